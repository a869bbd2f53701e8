"""A launch dies when all packs are staged: whoever comes next finishes its save from the stage, or says why not."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from tiers_rig import Process, TieredPlace, assert_state, named, of_pack, state_of

import ckptfmt
from ckptfmt.backends.memory import MemoryBackend
from ckptfmt.engine import process as processes
from ckptfmt.errors import BackendError, Fenced, SaveFailed, Unavailable
from ckptfmt.format import layout
from ckptfmt.format.states import State
from ckptfmt.testing.faults import Fault

PACK = layout.pack_name(0, 0)
PART = layout.part_name(0)


@pytest.fixture(autouse=True)
def _gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder of every lease is a process that is no more."""
    monkeypatch.setattr(processes, "is_gone", lambda launch: True)


def die_at(place: TieredPlace, op: str, name: str, *, timing: str = "before", **options: object) -> Process:
    """Save step 1, commit it; then die in the save of step 2."""
    process = place.open(**options)  # type: ignore[arg-type]
    checkpointer = process.checkpointer()
    checkpointer.save(state_of(1), step=1).result(10)  # type: ignore[union-attr]
    checkpointer.wait(10)
    process.backend.add(Fault(op, error=process.die, timing=timing, when=named(name)))  # type: ignore[arg-type]
    pending = checkpointer.save(state_of(2), step=2)
    assert pending is not None
    assert pending.exception(30) is not None
    assert process.dead
    return process


DEATHS = [
    ("open_writer", PACK, "before"),
    ("write_at", PACK, "torn"),
    ("finish", PACK, "before"),
    ("finish", PACK, "after"),
    ("create", PART, "before"),
    ("create", PART, "after"),
]


@pytest.mark.parametrize("takeover", [False, True])
@pytest.mark.parametrize(("op", "name", "timing"), DEATHS)
def test_what_was_staged_is_finished(place: TieredPlace, op: str, name: str, timing: str, takeover: bool) -> None:
    die_at(place, op, name, timing=timing)
    process = place.open()
    foretold = process.repository.recover(dry_run=True).actions
    if takeover:
        checkpointer = process.checkpointer()
        into = dict.fromkeys(state_of(0))
        report = checkpointer.restore(into, strict=False)
        assert report is not None
        assert report.step == 2
        assert_state(into, 2)
        checkpointer.save(state_of(3), step=3).result(10)  # type: ignore[union-attr]
    else:
        assert process.repository.recover().actions == foretold
        assert process.repository.recover().actions == ()
    assert [(action.action, action.step) for action in foretold] == [("committed", 2)]
    assert "from the stage" in foretold[0].reason
    assert_state(process.repository.generation(process.rows()[1].id).load(), 2)
    assert process.site.sql().ranks(process.rows()[1].id)[0].replicated_bytes


def test_a_copy_that_was_whole_is_not_made_again(place: TieredPlace) -> None:
    die_at(place, "create", PART)
    process = place.open()
    process.repository.recover()
    assert process.backend.counts["write_at"] == 0
    assert process.rows()[1].state is State.COMMITTED


def test_a_copy_of_other_bytes_is_no_copy(place: TieredPlace) -> None:
    die_at(place, "create", PART)
    process = place.open()
    store = MemoryBackend(place.url.partition("://")[2])._store
    (key,) = (key for key in store.objects if process.rows()[1].key in key and key.endswith(PACK))
    store.objects[key][9000] ^= 1
    process.repository.recover()
    row = process.rows()[1]
    assert row.state is State.COMMITTED
    assert layout.pack_name(0, 0, 1) in place.names(place.url, row.key)
    assert_state(process.repository.generation(row.id).load(), 2)


def test_half_a_stage_is_aborted(place: TieredPlace) -> None:
    process = place.open()
    checkpointer = process.checkpointer()
    process.stage.add(Fault("create", error=process.die, when=named("staged")))
    pending = checkpointer.save(state_of(1), step=1)
    assert pending is not None
    pending.exception(30)
    process = place.open()
    (action,) = process.repository.recover().actions
    assert action.action == "aborted"
    (row,) = process.rows()
    assert place.names(place.stage_url, row.key) == set()


def test_a_stage_that_is_lost_is_told_by_host(place: TieredPlace) -> None:
    die_at(place, "open_writer", PACK)
    place.lose_stage()
    process = place.open()
    (foretold,) = process.repository.recover(dry_run=True).actions
    (action,) = process.repository.recover().actions
    assert action == foretold
    assert action.action == "aborted"
    assert f"rank 0 staged on host {processes.host_name()} ({place.stage_url})" in action.reason
    with process.checkpointer() as checkpointer:
        into = dict.fromkeys(state_of(0))
        assert checkpointer.restore(into, strict=False).step == 1  # type: ignore[union-attr]


def test_without_the_stage_it_is_aborted_and_told(place: TieredPlace) -> None:
    die_at(place, "open_writer", PACK)
    process = place.open(staged=False)
    (action,) = process.repository.recover().actions
    assert action.action == "aborted"
    assert "staged on host" in action.reason


def test_damage_on_the_stage_aborts(place: TieredPlace) -> None:
    die_at(place, "open_writer", PACK)
    store = MemoryBackend(place.stage_url.partition("://")[2])._store
    for key in store.objects:
        if key.endswith(PACK):
            store.objects[key][9000] ^= 1
    process = place.open()
    (action,) = process.repository.recover().actions
    assert action.action == "aborted"
    assert "'w'" in action.reason


def test_a_durable_tier_that_is_away_settles_nothing(place: TieredPlace) -> None:
    die_at(place, "open_writer", PACK)
    process = place.open()
    process.backend.add(Fault("open_writer", error=lambda: Unavailable("away"), times=None, when=of_pack))
    with pytest.raises(Unavailable):
        process.repository.recover()
    assert process.rows()[1].state is State.WRITING
    process.backend.heal()
    assert [action.action for action in process.repository.recover().actions] == ["committed"]


def test_a_stale_upload_that_ends_late_changes_nothing(place: TieredPlace) -> None:
    """The older launch stands in the middle of its copy while a newer one finishes its save for it; then it goes on."""
    older = place.open()
    checkpointer = older.checkpointer()
    hold = threading.Event()
    held = older.backend.add(Fault("write_at", hold=hold, when=of_pack))
    pending = checkpointer.save(state_of(1), step=1)
    assert pending is not None
    assert held.reached.wait(10)
    newer = place.open()
    second = newer.checkpointer(takeover=True)
    (row,) = newer.rows()
    assert row.state is State.COMMITTED
    before = {name: data for name, data in place.objects(place.url).items() if not name.endswith(PACK)}
    hold.set()
    assert pending.exception(30) is None, "a save that a newer launch finished is saved"
    with pytest.raises(Fenced):
        checkpointer.save(state_of(5), step=5)
    after = place.objects(place.url)
    assert {name: after[name] for name in before} == before
    assert_state(newer.repository.generation(row.id).load(), 1)
    assert_state(second.save(state_of(2), step=2).result(10).load(), 2)  # type: ignore[union-attr]


def test_two_launches_upload_at_once(place: TieredPlace) -> None:
    """The older one is fenced in the middle of its copy of what nobody can finish but itself: it says so."""
    older = place.open()
    checkpointer = older.checkpointer()
    hold = threading.Event()
    held = older.backend.add(Fault("write_at", hold=hold, when=of_pack))
    pending = checkpointer.save(state_of(1), step=1)
    assert pending is not None
    assert held.reached.wait(10)
    newer = place.open(staged=False)  # on another host
    second = newer.checkpointer(takeover=True)
    again = second.save(state_of(2), step=2)
    hold.set()
    error = pending.exception(30)
    assert isinstance(error, SaveFailed)
    assert again is not None
    assert_state(again.result(10).load(), 2)
    assert [row.state is State.COMMITTED for row in newer.rows()] == [False, True]


CHILD = """
    import os, signal, sys, numpy as np, ckptfmt
    from ckptfmt.backends.posix import PosixBackend
    open_writer = PosixBackend.open_writer
    def killed(self, key, nbytes, **options):
        if "/stage/" not in self.url:
            print("staged", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return open_writer(self, key, nbytes, **options)
    PosixBackend.open_writer = killed
    repository = ckptfmt.open(sys.argv[1], stage=sys.argv[2])
    repository.checkpointer("run").save({"w": np.arange(3_000_000), "n": 7}, step=7).result()
"""


@pytest.mark.slow
def test_a_process_killed_with_all_packs_staged(tmp_path: Path) -> None:
    """On a disk, by SIGKILL."""
    root, stage = tmp_path / "r", tmp_path / "stage"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CHILD), str(root), str(stage)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (-9, "staged\n"), done.stderr
    with ckptfmt.open(root, stage=stage) as repository:
        (action,) = repository.recover().actions
        assert action.action == "committed"
        found = repository.latest("run").load()
    assert found["n"] == 7
    assert int(found["w"].sum()) == 3_000_000 * 2_999_999 // 2


def test_replicas_that_were_asked_for_get_it_too(place: TieredPlace) -> None:
    die_at(place, "open_writer", PACK, replicas=1, durable_on=2)
    process = place.open(replicas=1, durable_on=2)
    process.repository.recover()
    row = process.rows()[1]
    assert row.tiers == (process.replicas[0].uuid,)
    assert PACK in place.names(place.replica_urls[0], row.key)


def test_a_dead_process_is_dead(place: TieredPlace) -> None:
    process = place.open()
    process.die()
    with pytest.raises(BackendError):
        process.stage.list("")


@pytest.mark.parametrize("op", ["read", "head"])
@pytest.mark.parametrize("dry_run", [False, True])
def test_a_stage_that_is_away_for_a_moment_says_nothing_about_what_it_holds(
    place: TieredPlace, op: str, dry_run: bool
) -> None:
    die_at(place, "create", PART)
    process = place.open()
    process.stage.add(Fault(op, error=lambda: Unavailable("the stage does not answer"), times=1, when=named("/r0")))
    (action,) = process.repository.recover(dry_run=dry_run).actions
    assert action.action == "committed", action.reason
