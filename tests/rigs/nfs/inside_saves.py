"""Repositories on NFS, with a catalog on a disk of the host: saved by ranks on different clients, killed, restored."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked import Forked, at_once, in_child
from nfs_servers import EXPORT
from rig_disks import hide_mounts
from rig_jobs import Facts, Place, differences, examine, state_of

import ckptfmt
from ckptfmt.backends.syscalls import Syscalls
from ckptfmt.errors import CatalogError, InvalidInput, NotFound

ROWS = 400_000


@pytest.fixture(autouse=True)
def _no_catalog_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CKPTFMT_CATALOG", raising=False)


@pytest.fixture
def local(name: str) -> Path:
    """A folder on the host's disk."""
    folder = Path("/mnt/disk/local") / name
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def place(mounts: tuple[Path, Path], name: str, local: Path) -> Place:
    return Place(mounts[0] / name / "r", local / "catalog.sqlite")


# -- where the catalog may lie ----------------------------------------------------------------------
def test_a_repository_on_nfs_has_no_embedded_catalog(mounts: tuple[Path, Path], name: str) -> None:
    root = mounts[0] / name / "r"
    with pytest.raises(InvalidInput, match="postgresql://"):
        ckptfmt.open(root)
    with pytest.raises(InvalidInput, match="postgresql://"):
        ckptfmt.save({"x": np.zeros(3)}, root)
    assert [path.name for path in (EXPORT / name).rglob("*sqlite*")] == []


def test_an_sqlite_catalog_on_nfs_is_refused(mounts: tuple[Path, Path], name: str) -> None:
    for place in (mounts[0] / name, mounts[0] / name / "r"):
        with pytest.raises(CatalogError, match="use a PostgreSQL catalog") as caught:
            ckptfmt.open(mounts[0] / name / "r", catalog=f"sqlite:///{place}/catalog.sqlite")
        assert caught.value.kind == "catalog_filesystem"
        assert "nfs4" in str(caught.value)
    assert [path.name for path in (EXPORT / name).rglob("*sqlite*")] == []


def test_an_sqlite_catalog_on_nfs_is_refused_through_a_link(mounts: tuple[Path, Path], name: str, local: Path) -> None:
    (local / "link").symlink_to(mounts[0] / name)
    with pytest.raises(CatalogError, match="use a PostgreSQL catalog"):
        ckptfmt.open(local / "r", catalog=f"sqlite:///{local}/link/catalog.sqlite")


# -- saved, killed, restored ------------------------------------------------------------------------
def save_steps(place: Place, *steps: int) -> None:
    with place.open() as repository, repository.checkpointer("run") as checkpointer:
        for step in steps:
            pending = checkpointer.save(state_of(step), step=step)
            assert pending is not None
            pending.result(60)


def die_at(name: str, nth: int) -> None:
    """From now on, the nth call of that name ends this process before it is made."""
    call, left = getattr(Syscalls, name), iter(range(1, nth))

    def dying(*arguments: Any) -> Any:
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments)

    setattr(Syscalls, name, dying)


MOMENTS = [("pwrite", 1), ("fsync", 1), ("fsync", 6), ("link", 3)]


@pytest.mark.parametrize(("call", "nth"), MOMENTS)
def test_a_killed_save_leaves_what_was_committed(place: Place, mounts: tuple[Path, Path], call: str, nth: int) -> None:
    in_child(lambda: save_steps(place, 1))

    def die_in_second() -> None:
        with place.open() as repository, repository.checkpointer("run") as checkpointer:
            die_at(call, nth)
            pending = checkpointer.save(state_of(2), step=2)
            assert pending is not None
            pending.result(60)

    assert Forked(die_in_second).end() == ("", -signal.SIGKILL)
    other = Place(mounts[1] / place.root.relative_to(mounts[0]))
    with other.open(mode="r", proof=True) as repository:  # as another host sees it, at once
        assert differences(repository.latest("run").load(), 1) is None
    assert in_child(lambda: examine(place, Facts(must={"run": {1}}))) == []
    in_child(lambda: save_steps(place, 3))
    assert in_child(lambda: examine(place, Facts(must={"run": {1, 3}}))) == []


def test_a_host_without_the_catalog_sees_each_commit_at_once(place: Place, mounts: tuple[Path, Path]) -> None:
    other = mounts[1] / place.root.relative_to(mounts[0])
    with pytest.raises(NotFound):
        ckptfmt.load(other)
    for step in (1, 2, 3):
        in_child(lambda step=step: save_steps(place, step))  # type: ignore[misc]
        assert differences(ckptfmt.load(other, run="run"), step) is None


# -- two ranks, each on a client of its own ---------------------------------------------------------
def see_through(mount: Path, at: Path) -> None:
    """From now on this process sees ``mount`` at ``at``: as on a host that has its own client there."""
    hide_mounts()
    subprocess.run(["mount", "--bind", mount, at], check=True)


def share_of(step: int, rank: int) -> dict[str, Any]:
    whole = np.random.default_rng(step).standard_normal(ROWS)
    mine = whole[rank * ROWS // 2 : (rank + 1) * ROWS // 2].copy()
    return {
        "w": ckptfmt.Sharded(mine, (ROWS,), (rank * ROWS // 2,)),
        "own": ckptfmt.PerRank({"position": 10 * step + rank}),
        "step": step,
    }


def test_two_ranks_on_two_clients_save_and_restore(place: Place, mounts: tuple[Path, Path]) -> None:
    place.open().close()
    token = secrets.token_hex(16)

    def work(rank: int) -> list[int]:
        see_through(mounts[rank], mounts[0])
        ids = []
        ranks: dict[str, Any] = {"rank": rank, "world_size": 2, "coordination": "catalog", "launch": token}
        with place.open() as repository, repository.checkpointer("run", **ranks) as checkpointer:
            for step in (1, 2, 3):
                pending = checkpointer.save(share_of(step, rank), step=step)
                assert pending is not None
                ids.append(pending.result(60).id)
            into = share_of(9, rank)
            report = checkpointer.restore(into)
            assert report is not None
            assert (report.step, into["own"].value["position"]) == (3, 30 + rank)
            assert into["w"].local.tobytes() == share_of(3, rank)["w"].local.tobytes()
        return ids

    one, other = at_once(work, 2)
    assert one == other
    with place.open(mode="r") as repository:
        found = repository.latest("run").load(rank=0)
        assert found["w"].tobytes() == np.random.default_rng(3).standard_normal(ROWS).tobytes()
