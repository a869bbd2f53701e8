"""Commits, copies and deletions on file systems that neither link, rename nor change modes (FR-096)."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import pytest
from forked import Forked
from tiers_rig import assert_state, state_of

import ckptfmt
from ckptfmt.backends.syscalls import Syscalls
from ckptfmt.engine.keep import gc
from ckptfmt.format import layout
from ckptfmt.format.states import State

CODES = [errno.EPERM, errno.ENOSYS, errno.EXDEV, errno.EOPNOTSUPP]


@pytest.fixture(params=CODES, ids=errno.errorcode.get)
def refusing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    code: int = request.param
    asked: list[str] = []

    def refuse(name: str) -> Any:
        def call(*arguments: object, **_: object) -> NoReturn:
            asked.append(name)
            raise OSError(code, os.strerror(code))

        return call

    for name in ("rename", "replace", "renames", "link", "chmod", "fchmod", "lchmod"):
        monkeypatch.setattr(os, name, refuse(name), raising=False)
    for name in ("link", "rename_noreplace"):
        monkeypatch.setattr(Syscalls, name, refuse(name))
    yield
    assert set(asked) <= {"link", "rename_noreplace"}, "modes are left as they are, and nothing is renamed over"


def _open(folder: Path) -> ckptfmt.Repository:
    return ckptfmt.open(
        folder / "durable",
        stage=folder / "stage",
        replicas=[folder / "replica"],
        catalog=f"sqlite:///{folder}/catalog.sqlite",
    )


def _save(folder: Path, *seeds: int) -> None:
    with _open(folder) as repository, repository.checkpointer("run") as checkpointer:
        for seed in seeds:
            checkpointer.save(state_of(seed), step=seed).result(20)  # type: ignore[union-attr]


def _collect(repository: ckptfmt.Repository) -> None:
    done = gc.collect(repository._connection.site, dry_run=False, grace=timedelta(0))
    assert done.damaged == ()


@pytest.mark.usefixtures("refusing", "quick")
def test_a_life_without_links_renames_and_modes(tmp_path: Path) -> None:
    _save(tmp_path, 1, 2, 3)
    with _open(tmp_path) as repository:
        assert repository.latest("run").verify().ok
        site = repository._connection.site
        gc.retire(site, repository.generations(run="run")[-1].id)
        _collect(repository)
        _collect(repository)
        assert [row.step for row in repository.generations(run="run")] == [3, 2]
    for root in ("durable", "replica"):
        assert_state(ckptfmt.load(tmp_path / root, run="run", catalog="none"), 3)
    left = {path.name for path in tmp_path.rglob("*") if ".ckptfmt-tmp" in path.name}
    assert not left


TORN = [
    ("stage", layout.staged_part_name(0)),
    ("durable", layout.part_name(0)),
    ("durable", "manifest-"),
    ("durable", layout.COMMIT),
    ("replica", layout.part_name(0)),
    ("replica", layout.COMMIT),
]


def _die_within(tier: str, name: str) -> None:
    """The next write to the object itself ends this process when half of it is done."""
    plain = Syscalls.pwrite

    def pwrite(self: Syscalls, descriptor: int, data: memoryview, offset: int) -> int:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if f"/{tier}/" in path and os.path.basename(path).startswith(name):
            plain(self, descriptor, data[: len(data) // 2], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(self, descriptor, data, offset)

    Syscalls.pwrite = pwrite  # type: ignore[method-assign]


@pytest.mark.parametrize("refusing", [errno.EPERM], indirect=True)
@pytest.mark.parametrize(("tier", "name"), TORN)
@pytest.mark.usefixtures("refusing", "quick")
def test_a_kill_within_an_object_shows_nothing_and_is_healed(tmp_path: Path, tier: str, name: str) -> None:
    _save(tmp_path, 1)

    def die() -> None:
        _die_within(tier, name)
        _save(tmp_path, 2)

    assert Forked(die).end() == ("", -signal.SIGKILL)
    with _open(tmp_path) as repository:
        latest = repository.latest("run")
        assert_state(latest.load(), latest.step)
    _save(tmp_path, 3)
    with _open(tmp_path) as repository:
        repository.recover()
        _collect(repository)
        _collect(repository)
        site = repository._connection.site
        assert not [row for row in site.sql().generations(run="run") if row.state in (State.WRITING, State.DURABLE)]
        for info in repository.generations(run="run"):
            generation = repository.generation(info.id)
            assert_state(generation.load(), info.step)
            assert generation.verify().ok
    for root in ("durable", "replica"):
        assert_state(ckptfmt.load(tmp_path / root, run="run", catalog="none"), 3)


@pytest.mark.slow
@pytest.mark.parametrize("refusing", [errno.EPERM], indirect=True)
@pytest.mark.parametrize("tier", ["durable", "replica"])
@pytest.mark.parametrize("name", [layout.COMMIT, layout.RETIRED])
@pytest.mark.usefixtures("refusing", "quick")
def test_a_gc_killed_within_a_verdict_is_finished_by_the_next(tmp_path: Path, tier: str, name: str) -> None:
    """COMMIT.json of an aborted save, RETIRED.json of a retired generation."""
    _save(tmp_path, 1, 2)

    def leave() -> None:
        # Dies as the save is about to write its part: on the durable tier lie its packs, on the replica as well.
        _die_within("durable", layout.part_name(0))
        with (
            ckptfmt.open(
                tmp_path / "durable",
                replicas=[tmp_path / "replica"],
                durable_on=2,
                catalog=f"sqlite:///{tmp_path}/catalog.sqlite",
            ) as repository,
            repository.checkpointer("run") as checkpointer,
        ):
            checkpointer.save(state_of(3), step=3).result(20)  # type: ignore[union-attr]

    assert Forked(leave).end() == ("", -signal.SIGKILL)

    def die() -> None:
        _die_within(tier, name)
        with _open(tmp_path) as repository:
            repository.recover()
            gc.retire(repository._connection.site, repository.generations(run="run")[-1].id)
            _collect(repository)

    assert Forked(die).end() == ("", -signal.SIGKILL)
    with _open(tmp_path) as repository:
        repository.recover()
        site = repository._connection.site
        first, *_ = sorted(site.sql().generations(run="run"), key=lambda row: row.id)
        if first.state is State.COMMITTED:
            gc.retire(site, first.id)
        for _ in range(2):
            _collect(repository)
        states = [row.state for row in sorted(site.sql().generations(run="run"), key=lambda row: row.id)]
        assert states == [State.DELETED, State.COMMITTED, State.DELETED]
        assert_state(repository.latest("run").load(), 2)
    for root in ("durable", "replica"):
        assert len(list((tmp_path / root).rglob("*.safetensors"))) == 1
        assert_state(ckptfmt.load(tmp_path / root, run="run", catalog="none"), 2)
