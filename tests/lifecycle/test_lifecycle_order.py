"""The order of a save's effects, and a crash between any two of them."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest
from lifecycle_rig import Place, Process, assert_state, dead_catalog, ended, run_child, state_of

import ckptfmt
from ckptfmt.errors import NotCommitted, OutcomeUnknown
from ckptfmt.format.states import State
from ckptfmt.testing.faults import Fault

ORDER = [
    "begin_save",
    "make_folder",
    "open_writer",
    "write_at",
    "finish",
    "create part",
    "report_rank",
    "create manifest",
    "mark_durable",
    "commit",
    "create COMMIT",
    "make_folder",
    "create hint",
    "set_proven",
]


def _named(op: str, key: str) -> str:
    if op != "create":
        return op
    name = key.rpartition("/")[2]
    kinds = {"COMMIT.json": "COMMIT", "r00000.part.json": "part"}
    return f"create {kinds.get(name) or ('manifest' if name.startswith('manifest-') else 'hint')}"


def test_data_then_part_then_rank_then_manifest_then_row_then_commit_then_proof_then_hint(place: Place) -> None:
    process = place.open()
    with process.checkpointer() as checkpointer:
        del process.journal[:]
        pending = checkpointer.save(state_of(1), step=1)
        assert pending is not None
        pending.result()
    assert [_named(*entry) for entry in process.journal] == ORDER


def test_events_tell_the_same_order(place: Place) -> None:
    process = place.open()
    with process.checkpointer() as checkpointer:
        checkpointer.save(state_of(1), step=1)
    assert process.events() == ["run", "launch", "begin", "durable", "commit", "prove", "close"]


# -- crashes ----------------------------------------------------------------------------------------
# "After" one effect is "before" the next: the list stops at every state that a crash can leave.
STORAGE_CRASHES = [
    ("make_folder", 1, "before"),
    ("open_writer", 1, "before"),
    ("write_at", 1, "before"),
    ("write_at", 1, "torn"),
    ("finish", 1, "before"),
    ("create", 1, "before"),  # part
    ("create", 2, "before"),  # manifest
    ("create", 3, "before"),  # COMMIT.json
    ("make_folder", 2, "before"),
    ("create", 4, "before"),  # hint
]
SQL_CRASHES = [
    ("begin_save", "before"),
    ("report_rank", "before"),
    ("report_rank", "after"),
    ("mark_durable", "before"),
    ("mark_durable", "after"),
    ("commit", "before"),
    ("commit", "after"),
    ("set_proven", "before"),
    ("set_proven", "after"),
]


def _save_once(process: Process, seed: int) -> None:
    with process.checkpointer() as checkpointer:
        checkpointer.save(state_of(seed), step=seed)


def _crash(process: Process) -> None:
    """Save step 2 until the process dies: its handle cannot know."""
    checkpointer = process.checkpointer()
    pending = checkpointer.save(state_of(2), step=2)
    assert pending is not None
    error = pending.exception(timeout=30)
    assert process.machine.dead.is_set(), "the fault was never met"
    assert error is None or isinstance(error, OutcomeUnknown) or process.catalog.counts.get("begin_save") == 1
    if error is None:  # it died after the commit point
        assert checkpointer.last_committed is not None
        assert checkpointer.last_committed.proof_pending


def _check_crashed(fresh: Process) -> tuple[bool, bool]:
    """Before anything is settled the latest is whole. Returns whether step 2 is committed, or can be finished."""
    row = fresh.row()
    committed = row.step == 2 and row.commit_seq is not None
    latest = fresh.repository.latest("run")
    assert latest.step == (2 if committed else 1)
    assert_state(latest.load(), latest.step)
    if row.step == 2 and not committed:
        with pytest.raises(NotCommitted):
            fresh.repository.generation(row.id)
    ranks = [rank.state for rank in fresh.catalog.ranks(row.id)]
    return committed, row.step == 2 and not committed and ranks == ["durable"]


def _check_settled(fresh: Process, step: int) -> None:
    """Catalog and storage agree, what is committed is whole, gc takes nothing live, and the next save works."""
    generation = fresh.repository.latest("run")
    assert generation.step == step
    assert generation.verify().ok
    with fresh.checkpointer(takeover=True) as checkpointer:
        restored = dict.fromkeys(state_of(0))
        report = checkpointer.restore(restored, strict=False)
        assert report is not None
        assert report.step == step
        checkpointer.save(state_of(3), step=3)
    assert not fresh.repository.recover().actions
    swept = fresh.repository.gc(dry_run=False)
    assert not swept.unknown
    for row in fresh.rows():
        if row.state is State.COMMITTED:
            assert row.proven_at is not None
            assert_state(fresh.repository.generation(row.id).load(), row.step)
        else:
            assert ended(row)
            assert (row.abort_stage, row.abort_rank) == ("recover", None)
            assert row.abort_reason
            assert fresh.objects(f"runs/{row.run_key}/{row.key}") == [f"runs/{row.run_key}/{row.key}/COMMIT.json"]
    assert_state(fresh.repository.latest("run").load(), 3)


@pytest.mark.parametrize(("op", "nth", "timing"), STORAGE_CRASHES)
def test_storage_crash_leaves_a_loadable_latest(place: Place, timing: str, op: str, nth: int) -> None:
    _save_once(place.open(), 1)
    process = place.open()
    process.backend.add(Fault(op, error=process.kill, timing=timing, nth=nth))  # type: ignore[arg-type]
    _crash(process)
    fresh = place.open()
    committed, complete = _check_crashed(fresh)
    with fresh.checkpointer(takeover=True):
        assert fresh.row().state is (
            State.COMMITTED if committed or complete or fresh.row().step == 1 else State.ABORTED
        )
    _check_settled(fresh, 2 if committed or complete else 1)


@pytest.mark.parametrize(("op", "timing"), SQL_CRASHES)
def test_catalog_crash_leaves_a_loadable_latest(place: Place, timing: str, op: str) -> None:
    _save_once(place.open(), 1)
    process = place.open()

    def die() -> BaseException:
        process.die()
        return dead_catalog()

    process.catalog.add(Fault(op, error=die, timing=timing))  # type: ignore[arg-type]
    _crash(process)
    fresh = place.open()
    committed, complete = _check_crashed(fresh)
    live = fresh.catalog.live_launch("run")
    left = [(action.generation_id, action.action) for action in fresh.repository.recover(dry_run=True).actions]
    assert [action for _, action in left] in ([], ["left"], ["proved"])  # its launch seems to live
    fresh.catalog.close_launch(live.id)

    before = (fresh.rows(), fresh.objects(), fresh.events())
    foretold = fresh.repository.recover(dry_run=True)
    assert (fresh.rows(), fresh.objects(), fresh.events()) == before
    done = fresh.repository.recover()
    assert foretold.actions == done.actions
    assert len(done.actions) <= 1
    _check_settled(fresh, 2 if committed or complete else 1)


KILLED = """
import dataclasses, os, signal, sys
import numpy as np
from ckptfmt import connect
from ckptfmt.repository import Repository
from ckptfmt.testing.faults import Fault, FaultyBackend

def die():
    os.kill(os.getpid(), signal.SIGKILL)

connection = connect.open_site(sys.argv[1], mode="w", catalog=None, storage_options=None)
fault = Fault(sys.argv[2], error=die, timing=sys.argv[3], when=lambda call: step == 2 and sys.argv[4] in call.key)
site = dataclasses.replace(connection.site, backend=FaultyBackend(connection.site.backend, fault))
repository = Repository(dataclasses.replace(connection, site=site), "w")
checkpointer = repository.checkpointer("run")
for step in (1, 2):
    checkpointer.save({"w": np.full(30000, float(step))}, step=step)
    checkpointer.wait()
"""
KILLS = [
    ("write_at", "torn", ".safetensors", 1),
    ("finish", "after", ".safetensors", 1),
    ("create", "before", "/manifest-", 2),
    ("create", "after", "/manifest-", 2),
    ("create", "before", "COMMIT.json", 2),
    ("create", "after", "/commits/", 2),
]


@pytest.mark.parametrize(("op", "timing", "where", "step"), KILLS)
def test_a_process_killed_in_the_middle_is_followed_by_the_next(
    root: Path, op: str, timing: str, where: str, step: int
) -> None:
    """SIGKILL, on a real disk: no takeover, no waiting, no operator. ``step`` is where the next launch resumes."""
    status, _, err = run_child(KILLED, root, op, timing, where)
    assert status == -signal.SIGKILL, err
    with ckptfmt.open(root, mode="r") as repository:
        seen = repository.latest("run")
        assert seen.verify().ok
        assert (seen.load()["w"] == seen.step).all()
        assert seen.step <= step
    with ckptfmt.open(root) as repository, repository.checkpointer("run") as checkpointer:
        state = {"w": np.zeros(30000)}
        report = checkpointer.restore(state)
        assert report is not None
        assert report.step == step
        assert (state["w"] == step).all()
        pending = checkpointer.save({"w": np.full(30000, 3.0)}, step=3)
        assert pending is not None
        assert pending.result().verify().ok
        assert not repository.recover().actions
