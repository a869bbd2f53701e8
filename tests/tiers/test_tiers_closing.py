"""Of several places that are opened one after the other all are closed again, whichever of them cannot be used."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiers_rig import state_of

import ckptfmt
from ckptfmt.backends import posix
from ckptfmt.catalog.sql import SqlCatalog
from ckptfmt.engine import process
from ckptfmt.errors import CatalogError, CkptError, Conflict, InvalidInput, NotFound
from ckptfmt.format import layout
from ckptfmt.testing.crash_checks import command_line
from ckptfmt.views.opening import places_of, reopened


class Counted(posix.PosixBackend):
    """Knows which backends there are, and which were closed."""

    made: list[Counted]

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.closed = False
        Counted.made.append(self)

    def close(self) -> None:
        super().close()
        self.closed = True


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None) -> Path:
    """``r`` with the stage ``stage`` and the replicas ``one`` and ``two``, and ``q``, another repository. From here on
    backends are counted."""
    with ckptfmt.open(
        tmp_path / "r", stage=tmp_path / "stage", replicas=[tmp_path / "one", tmp_path / "two"]
    ) as repository:
        repository.checkpointer("run").close()
    ckptfmt.open(tmp_path / "q", replicas=[tmp_path / "copy-of-q"]).close()
    Counted.made = []
    monkeypatch.setattr(posix, "PosixBackend", Counted)
    return tmp_path


def left_open() -> list[str]:
    assert Counted.made
    return [backend.url for backend in Counted.made if not backend.closed]


def descriptors_of(folder: Path) -> Iterator[str]:
    """What this process has open below ``folder``."""
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        if target.startswith(str(folder)):
            yield target


Open = Callable[[Path], Any]

OPENINGS: dict[str, tuple[type[CkptError], Open]] = {
    "the replica is another one's, after the stage": (
        Conflict,
        lambda at: ckptfmt.open(at / "r", stage=at / "stage", replicas=[at / "copy-of-q"]),
    ),
    "the second replica is the root": (
        InvalidInput,
        lambda at: ckptfmt.open(at / "r", replicas=[at / "one", at / "r"]),
    ),
    "the stage cannot be made": (
        CkptError,
        lambda at: ckptfmt.open(at / "r", stage=at / "a-file" / "stage"),
    ),
    "the replica cannot be made": (
        CkptError,
        lambda at: ckptfmt.open(at / "r", stage=at / "stage", replicas=[at / "a-file" / "copy"], durable_on=2),
    ),
    "the stage is the replica": (
        Conflict,
        lambda at: ckptfmt.open(at / "r", stage=at / "stage", replicas=[next((at / "stage").iterdir())]),
    ),
    "there is no repository": (NotFound, lambda at: ckptfmt.open(at / "nothing", mode="r")),
    "it is a replica": (Conflict, lambda at: ckptfmt.open(at / "one")),
    "the catalog is gone": (CatalogError, lambda at: (at / "r" / "catalog.sqlite").unlink() or ckptfmt.open(at / "r")),
    "the catalog governs another root": (
        Conflict,
        lambda at: ckptfmt.open(at / "r", catalog=f"sqlite:///{at}/q/catalog.sqlite"),
    ),
    "the root cannot be made": (CkptError, lambda at: ckptfmt.open(at / "a-file" / "r")),
}


@pytest.mark.parametrize("what", OPENINGS)
def test_what_was_opened_before_an_error_is_closed(places: Path, what: str) -> None:
    (places / "a-file").touch()
    error, opened = OPENINGS[what]
    with pytest.raises(error) as raised:
        opened(places)
    assert left_open() == []
    assert list(descriptors_of(places)) == [], "while the error is still held"
    assert raised.value is not None


def test_what_cannot_be_noted_in_the_catalog_is_closed(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **named: Any) -> None:
        raise CatalogError("not now")

    monkeypatch.setattr(SqlCatalog, "ensure_tier", refuse)
    with pytest.raises(CatalogError, match="not now"):
        ckptfmt.open(places / "r", stage=places / "stage", replicas=[places / "one"])
    assert len(Counted.made) == 3
    assert left_open() == []


def test_a_tier_that_is_left_out_is_closed(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading, no tier has to be there."""
    monkeypatch.setattr(process, "host_name", lambda: "elsewhere")
    with ckptfmt.open(places / "r", mode="r", stage=places / "stage", replicas=[places / "q", places / "one"]):
        root, stage, stranger, one = Counted.made
        assert (root.closed, stage.closed, stranger.closed, one.closed) == (False, True, True, False)
    assert left_open() == []


def test_a_place_where_the_root_was_before_is_looked_at_and_closed(places: Path) -> None:
    shutil.copytree(places / "r", places / "moved")
    ckptfmt.open(places / "moved").close()
    assert {Path(backend.url).name for backend in Counted.made} == {"r", "moved"}
    assert left_open() == []


@pytest.mark.parametrize("named", [("--stage", "q"), ("--replica", "one", "--replica", "q"), ()])
def test_the_command_line_closes_all_tiers(places: Path, named: tuple[str, ...]) -> None:
    """Those that it names, and those that the catalog knows, one of which has lost its mark."""
    (places / "two" / layout.TIER).unlink()
    words = [word if word.startswith("--") else str(places / word) for word in named]
    code, text = command_line("replicate", str(places / "r"), *words)
    assert (code == 0) == (not named), text
    assert len(Counted.made) >= 2
    assert left_open() == []


def test_closing_goes_on_where_one_place_cannot_be_closed(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = ckptfmt.open(places / "r", stage=places / "stage", replicas=[places / "one"])
    with repository.checkpointer("run") as checkpointer:
        checkpointer.save(state_of(1), step=1).result(20)  # type: ignore[union-attr]
    broken = Counted.made[1]
    monkeypatch.setattr(broken, "close", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        repository.close()
    assert left_open() == [broken.url]


@pytest.mark.parametrize("gone", ["COMMIT.json", "manifest-*"])
def test_a_generation_that_another_process_cannot_open_again(places: Path, gone: str) -> None:
    with (
        ckptfmt.open(places / "r", replicas=[places / "one"]) as repository,
        repository.checkpointer("run") as checkpointer,
    ):
        opened = checkpointer.save(state_of(1), step=1).result(20)._opened  # type: ignore[union-attr]
        where = opened.site.backend.url, opened.folder, opened.info.key, {}, places_of(opened)
    removed = [path for path in places.rglob(gone) if path.is_file()]
    for path in removed:
        path.unlink()
    assert removed
    Counted.made = []
    with pytest.raises(CkptError):
        reopened(*where)
    assert left_open() == []
