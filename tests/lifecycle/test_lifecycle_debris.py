"""What killed creates left behind is removed by gc, wherever it lies, unless somebody may still be at work there."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from lifecycle_rig import assert_state, state_of

import ckptfmt
from ckptfmt.engine import process
from ckptfmt.engine.keep import debris
from ckptfmt.engine.keep import gc as collecting
from ckptfmt.engine.reports import GcReport
from ckptfmt.engine.site import Site
from ckptfmt.ports.records import LaunchRecord, LaunchRequest
from ckptfmt.repository import Repository

LEFT = ".ckptfmt-tmp-1-00ff"


@pytest.fixture
def repository(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Repository]:
    """Two runs with a generation each."""
    monkeypatch.setattr(debris, "BETWEEN_LOOKS_SECONDS", 0.0)
    with ckptfmt.open(root) as opened:
        for run in ("one", "two"):
            with opened.checkpointer(run) as checkpointer:
                checkpointer.save(state_of(1), step=1)
        yield opened


def _site(repository: Repository) -> Site:
    return repository._connection.site


def _litter(root: Path, repository: Repository) -> dict[str, str]:
    """Leave something in every folder that creates write to; (key, run)."""
    left = {LEFT: "", f"catalogs/{LEFT}": ""}
    for row in repository.generations():
        (key,) = [found.run_key for found in _site(repository).sql().generations(run=row.run)]
        for place in (f"runs/{key}/commits", f"runs/{key}/{row.key}", f"runs/{key}"):
            left[f"{place}/{LEFT}"] = row.run
    for key in left:
        (root / key).write_bytes(b"half")
    return left


def _collect(repository: Repository, *, dry_run: bool = False) -> dict[str, str]:
    report: GcReport = collecting.collect(_site(repository), dry_run=dry_run, grace=timedelta(0))
    assert {(item.generation_id, item.nbytes, item.reason) for item in report.items} <= {(0, 4, "unfinished create")}
    return {item.object: item.run for item in report.items}


def _there(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob(LEFT)}


def _hold(repository: Repository, run: str, *, pid: int, started: str, seconds: float = 600.0) -> LaunchRecord:
    """A launch of another process of this host, of which nothing more is heard."""
    request = LaunchRequest(
        token=f"{pid:032x}", host=process.host_name(), pid=pid, boot_id=process.boot_id(), pid_started=started
    )
    return _site(repository).sql().acquire_launch(run, request, lease_seconds=seconds)


def test_leftovers_go_wherever_they_lie(root: Path, repository: Repository) -> None:
    left = _litter(root, repository)
    assert _collect(repository, dry_run=True) == left
    assert _there(root) == set(left)
    assert _collect(repository) == left
    assert _there(root) == set()
    assert _collect(repository) == {}
    assert_state(repository.latest("one").load(), 1)


def test_a_live_launch_keeps_its_own_and_what_belongs_to_all(root: Path, repository: Repository) -> None:
    left = _litter(root, repository)
    with repository.checkpointer("one"):
        assert _collect(repository) == {key: run for key, run in left.items() if run == "two"}
    assert _there(root) == {key for key, run in left.items() if run != "two"}
    _collect(repository)
    assert _there(root) == set()


def test_a_dead_holder_keeps_nothing_until_its_lease_lapses(root: Path, repository: Repository) -> None:
    _hold(repository, "one", pid=os.getpid(), started="1")  # the pid is another process's by now
    left = _litter(root, repository)
    assert _collect(repository) == left


def test_a_holder_that_may_live_elsewhere_keeps_them(root: Path, repository: Repository) -> None:
    request = LaunchRequest(token="a" * 32, host="elsewhere", pid=1, boot_id="b", pid_started="1")
    _site(repository).sql().acquire_launch("one", request, lease_seconds=600.0)
    left = _litter(root, repository)
    assert set(_collect(repository).values()) == {"two"}
    assert _there(root) == {key for key, run in left.items() if run != "two"}


def test_a_process_that_was_only_stopped_keeps_them(root: Path, repository: Repository) -> None:
    """Its lease has lapsed, but nobody has taken the run from it, and it is still there."""
    me = os.getpid()
    launch = _hold(repository, "one", pid=me, started=process.pid_started(me), seconds=0.001)
    left = _litter(root, repository)
    assert set(_collect(repository).values()) == {"two"}
    _site(repository).sql().close_launch(launch.id)
    assert _collect(repository) == {key: run for key, run in left.items() if run != "two"}


def test_what_appears_between_the_looks_stays(
    root: Path, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody began to write after the first look."""
    left = _litter(root, repository)
    new = [f"{key}-new" for key in left]

    def begin(_: float) -> None:
        for key in new:
            (root / key).write_bytes(b"half")

    monkeypatch.setattr(debris, "time", SimpleNamespace(monotonic=time.monotonic, sleep=begin))
    assert _collect(repository) == left
    assert sorted(str(path.relative_to(root)) for path in root.rglob(".ckptfmt-tmp-*")) == sorted(new)


def test_other_folders_in_the_root_are_not_looked_into(root: Path, repository: Repository) -> None:
    """Another repository may be at work there."""
    other = [f"other/{LEFT}", f"other/runs/r/{LEFT}", f"runs/unknown/{LEFT}"]
    for key in other:
        (root / key).parent.mkdir(parents=True, exist_ok=True)
        (root / key).write_bytes(b"half")
    assert _collect(repository) == {}
    assert _there(root) == set(other)


def test_a_held_run_keeps_its_leftovers(root: Path, repository: Repository) -> None:
    left = _litter(root, repository)
    _site(repository).sql().set_retention_hold("one", True)
    assert _collect(repository) == {key: run for key, run in left.items() if run != "one"}
