"""Whose a stage or a replica is, and who may open it."""

from __future__ import annotations

from pathlib import Path

import pytest

import ckptfmt
from ckptfmt.backends.posix import PosixBackend
from ckptfmt.engine import process, tier_marks
from ckptfmt.errors import Conflict, InvalidInput
from ckptfmt.format import layout


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "r"


def tiers(repository: ckptfmt.Repository):  # type: ignore[no-untyped-def]
    return repository._connection.site.tiers


def test_a_folder_is_shared_by_repositories(tmp_path: Path, root: Path) -> None:
    with (
        ckptfmt.open(root, stage=tmp_path / "stage") as one,
        ckptfmt.open(tmp_path / "q", stage=f"file://{tmp_path}/stage/") as two,
    ):
        uuids = {one._connection.site.repository, two._connection.site.repository}
    assert {path.name for path in (tmp_path / "stage").iterdir()} == uuids


def test_the_mark_stays_the_same(tmp_path: Path, root: Path) -> None:
    with ckptfmt.open(root, stage=tmp_path / "stage", replicas=[tmp_path / "copy"]) as repository:
        first = [tier.uuid for tier in tiers(repository).every()]
        known = repository._connection.site.sql().tiers()
    with ckptfmt.open(root, stage=tmp_path / "stage", replicas=[tmp_path / "copy"]) as repository:
        assert [tier.uuid for tier in tiers(repository).every()] == first
    assert {(tier.uuid, tier.role, tier.host) for tier in known} == {
        (first[0], "stage", process.host_name()),
        (first[1], "replica", None),
    }


def test_the_stage_of_another_host_is_refused(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ckptfmt.open(root, stage=tmp_path / "stage").close()
    monkeypatch.setattr(process, "host_name", lambda: "elsewhere")
    with pytest.raises(Conflict, match=r"is the stage of host .*, this is elsewhere"):
        ckptfmt.open(root, stage=tmp_path / "stage")
    with ckptfmt.open(root, stage=tmp_path / "stage", mode="r") as repository:
        assert tiers(repository).stage is None


def test_a_replica_of_another_repository_is_refused(tmp_path: Path, root: Path) -> None:
    ckptfmt.open(root, replicas=[tmp_path / "copy"]).close()
    with pytest.raises(Conflict, match="is the replica of repository"):
        ckptfmt.open(tmp_path / "q", replicas=[tmp_path / "copy"])


def test_a_repository_is_no_replica_of_another_one(tmp_path: Path, root: Path) -> None:
    ckptfmt.open(root).close()
    ckptfmt.open(tmp_path / "q").close()
    with pytest.raises(Conflict):
        ckptfmt.open(root, replicas=[tmp_path / "q"])
    assert not (tmp_path / "q" / layout.TIER).exists(), "a repository that is somebody's gets no mark"
    (tmp_path / "link").symlink_to(root)
    for same in (root, tmp_path / "link"):
        with pytest.raises(InvalidInput, match="the durable tier itself"):
            ckptfmt.open(root, replicas=[same])


def test_reading_makes_nothing(tmp_path: Path, root: Path) -> None:
    ckptfmt.open(root).close()
    with ckptfmt.open(root, mode="r", stage=tmp_path / "stage", replicas=[tmp_path / "copy"]) as repository:
        assert not tiers(repository)
    assert not (tmp_path / "stage").exists()
    assert not (tmp_path / "copy").exists()


def test_a_replica_holds_what_a_root_needs(tmp_path: Path, root: Path) -> None:
    ckptfmt.open(root, replicas=[{"url": str(tmp_path / "copy"), "storage_options": {"direct": False}}]).close()
    for name in (layout.MARKER, "catalogs/00000001.json"):
        assert (tmp_path / "copy" / name).read_bytes() == (root / name).read_bytes()
    assert tier_marks.read_mark(PosixBackend(tmp_path / "copy")).role == "replica"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"stage": {"url": "s", "quota": 3}}, "quota"),
        ({"stage": {"keep": 3}}, "url"),
        ({"stage": {"url": "s", "keep": -1}}, "keep=-1"),
        ({"stage": {"url": "s", "bytes_max": 0}}, "bytes_max=0"),
        ({"replicas": "s"}, "list of places"),
        ({"replicas": ["s"], "durable_on": 3}, "durable_on=3"),
        ({"durable_on": 2}, "durable_on=2"),
        ({"bytes_max": 0.5}, "bytes_max=0.5"),
        ({"bandwidth_max": 0}, "bandwidth_max=0"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    tmp_path: Path, root: Path, options: dict[str, object], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInput, match=text):
        ckptfmt.open(root, **options)  # type: ignore[arg-type]
    assert not list(tmp_path.glob("s"))
