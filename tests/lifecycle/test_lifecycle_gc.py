"""Deletion: only what this catalog holds as aborted or retired, in an order in which a crash leaves too much."""

from __future__ import annotations

import dataclasses
import os
import sqlite3
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from lifecycle_rig import Place, Process, assert_state, dead_catalog, ended, named, state_of

import ckptfmt
from ckptfmt.engine.keep import gc as collecting
from ckptfmt.engine.keep import recover as recovering
from ckptfmt.engine.opened import open_row
from ckptfmt.engine.reports import GcReport
from ckptfmt.engine.sweep import close_aborted
from ckptfmt.errors import BackendError, CatalogBehind, Conflict, SaveFailed
from ckptfmt.exchange.ocdbt_export import export_ocdbt
from ckptfmt.format import ocdbt, verdict
from ckptfmt.format.states import State
from ckptfmt.ports.records import GenerationRecord, PackRecord
from ckptfmt.testing.faults import Fault

NOW = timedelta(0)


def _collect(process: Process, *, dry_run: bool = False, grace: timedelta = NOW) -> GcReport:
    return collecting.collect(process.site, dry_run=dry_run, grace=grace)


def _save(process: Process, *steps: int) -> None:
    with process.checkpointer() as checkpointer:
        for step in steps:
            checkpointer.save(state_of(step), step=step)


def _files(process: Process, row: GenerationRecord) -> list[str]:
    folder = f"runs/{row.run_key}/{row.key}"
    return [key.removeprefix(f"{folder}/") for key in process.objects(folder)]


def _leave_aborted(place: Place, step: int) -> Process:
    """A process dies while it writes its manifest; the next launch aborts what it left."""
    dead = place.open()
    dead.backend.add(Fault("create", error=dead.kill, when=named("part.json")))
    pending = dead.checkpointer(takeover=True).save(state_of(step), step=step)
    assert pending is not None
    pending.exception()
    fresh = place.open()
    with fresh.checkpointer(takeover=True):
        pass
    assert fresh.row().state is State.ABORTED
    return fresh


def test_what_an_aborted_save_left_goes_and_its_tombstone_stays(place: Place) -> None:
    _save(place.open(), 1)
    process = _leave_aborted(place, 2)
    row = process.row()
    assert _files(process, row) == ["r00000-p000.safetensors"]

    plan = _collect(process, dry_run=True)
    assert [item.object.rpartition("/")[2] for item in plan.items] == ["r00000-p000.safetensors"]
    assert _files(process, row) == ["r00000-p000.safetensors"]
    assert process.row().state is State.ABORTED

    done = _collect(process)
    assert done.items == plan.items
    assert done.nbytes > 90_000
    assert _files(process, row) == ["COMMIT.json"]
    found = verdict.decode_commit(process.backend.read(f"runs/{row.run_key}/{row.key}/COMMIT.json", limit=9999))
    assert (found.verdict, found.key, found.id) == ("aborted", row.key, row.id)
    assert process.row().state is State.DELETED
    assert not _collect(process).items
    assert_state(process.repository.latest().load(), 1)


def test_the_grace_protects_a_retired_generation_and_then_it_goes(place: Place) -> None:
    process = place.open()
    _save(process, 1, 2)
    first = process.rows()[0]
    collecting.retire(process.site, first.id)
    assert "RETIRED.json" in _files(process, first)
    waiting = process.repository.gc(dry_run=False)
    assert not waiting.items
    assert [f"run #{first.id}" in line for line in waiting.waiting] == [True]
    assert len(_files(process, first)) == 5

    done = _collect(process)
    assert len(done.items) == 3
    assert _files(process, first) == ["COMMIT.json", "RETIRED.json"]
    assert process.rows()[0].state is State.DELETED
    assert_state(process.repository.latest().load(), 2)


def test_what_was_written_for_other_tools_belongs_to_its_generation(place: Place) -> None:
    process = place.open()
    _save(process, 1, 2)
    first, second = process.rows()
    opened = open_row(process.site, first)
    export_ocdbt(opened)
    export_ocdbt(open_row(process.site, second))
    assert ocdbt.MANIFEST in _files(process, first)
    kept = _files(process, second)
    assert not _collect(process).items
    collecting.retire(process.site, first.id)
    _collect(process)
    assert _files(process, first) == ["COMMIT.json", "RETIRED.json"]
    assert _files(process, second) == kept

    export_ocdbt(opened)  # by somebody who knows nothing of that
    assert ocdbt.MANIFEST in _files(process, first)
    assert {item.reason for item in _collect(process).items} == {"appeared after deletion"}
    assert _files(process, first) == ["COMMIT.json", "RETIRED.json"]


def test_the_tombstone_is_there_before_the_first_byte_goes(place: Place) -> None:
    process = place.open()
    _save(process, 1, 2)
    first = process.rows()[0]
    process.catalog.retire(first.id)  # the process that retired it died before it wrote the tombstone
    del process.journal[:]
    _collect(process)
    folder = f"runs/{first.run_key}/{first.key}/"
    changes = [op for op, key in process.journal if key.startswith(folder) or op == "mark_swept"]
    assert changes == ["create", "delete", "delete", "delete", "mark_swept"]
    created = [key for op, key in process.journal if op == "create"]
    assert set(created) == {f"{folder}RETIRED.json"}


def test_a_tombstone_that_is_noted_is_not_made_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every gc meets every retired generation until its grace is over."""
    process = place.open()
    _save(process, 1, 2)
    first = process.rows()[0]
    collecting.retire(process.site, first.id)
    del process.journal[:]
    for _ in range(2):
        assert process.repository.gc(dry_run=False).waiting
    assert {op for op, _ in process.journal} == {"sweep_debris"}
    asked: list[int] = []
    looked: list[str] = []
    events, listed = process.catalog._inner.events, process.backend.list

    def ask(**named: Any) -> Any:
        asked.extend(number for name, number in named.items() if name == "generation_id")
        return events(**named)

    def look(prefix: str) -> Any:
        looked.append(prefix)
        return listed(prefix)

    monkeypatch.setattr(process.catalog._inner, "events", ask)
    monkeypatch.setattr(process.backend, "list", look)
    assert len(_collect(process).items) == 3
    assert asked == [first.id]
    assert looked.count(f"runs/{first.run_key}/{first.key}") == 1


def test_objects_that_appear_under_a_tombstoned_key_are_swept_again(place: Place) -> None:
    _save(place.open(), 1)
    process = _leave_aborted(place, 2)
    _collect(process)
    row = process.row()
    folder = f"runs/{row.run_key}/{row.key}"
    process.backend.create(f"{folder}/r00000-p001.safetensors", b"late")
    plan = _collect(process, dry_run=True)
    assert [(item.object, item.reason) for item in plan.items] == [
        (f"{folder}/r00000-p001.safetensors", "appeared after deletion")
    ]
    assert _collect(process).items == plan.items
    assert _files(process, row) == ["COMMIT.json"]


def test_unknown_folders_are_reported_and_never_deleted(place: Place) -> None:
    process = place.open()
    _save(process, 1)
    key = process.row().run_key
    strange = [f"runs/{key}/{'a' * 32}", f"runs/{key}/mine", "runs/somebody-0123456789"]
    for folder in strange:
        process.backend.make_folder(folder)
        process.backend.create(f"{folder}/keep.bin", b"precious")
    process.backend.create("notes.txt", b"precious")
    report = _collect(process)
    assert sorted(report.unknown) == sorted(strange)
    assert not report.items
    for name in [*(f"{folder}/keep.bin" for folder in strange), "notes.txt"]:
        assert process.backend.read(name, limit=100) == b"precious"


def test_folders_of_a_save_that_begins_meanwhile_are_not_unknown(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The catalog is asked once for all of them, after they were listed."""
    process = place.open()
    _save(process, 1, 2, 3)
    states = process.catalog._inner.states
    asked: list[int] = []

    def begin_then_tell() -> Any:
        asked.append(len(asked))
        return states()

    listed = process.backend.list_folders

    def list_then_save(prefix: str) -> Any:
        found = listed(prefix)
        if prefix == "runs" and not asked:
            _save(place.open(), 4)
        return found

    monkeypatch.setattr(process.catalog._inner, "states", begin_then_tell)
    monkeypatch.setattr(process.catalog._inner, "generation_by_key", None)
    monkeypatch.setattr(process.backend, "list_folders", list_then_save)
    assert collecting.unknown_folders(process.site) == []
    assert asked == [0]


def test_a_committed_verdict_saves_an_aborted_row(place: Place) -> None:
    """The catalog was set back to before the commit: storage knows better, and nothing is deleted."""
    process = place.open()
    _save(process, 1, 2)
    hint = process.objects(f"runs/{process.row().run_key}/commits")[-1]
    folder = f"runs/{process.row().run_key}/{process.row().key}"
    kept = {key: process.backend.read(key, limit=1 << 20) for key in process.objects(folder)}
    _forget_commit(process)
    assert process.row().state is State.ABORTED
    with pytest.raises(CatalogBehind, match="rebuild --merge"):
        _collect(process, dry_run=True)
    process.backend.delete(hint)  # without it the slot itself decides, at the last moment
    plan = _collect(process, dry_run=True)
    assert (plan.items, plan.adopted) == ((), (process.row().id,))
    assert process.row().state is State.ABORTED
    report = _collect(process)
    assert (report.items, report.adopted) == ((), (process.row().id,))
    row = process.row()
    assert (row.state, row.commit_seq) == (State.COMMITTED, 2)
    assert {key: process.backend.read(key, limit=1 << 20) for key in process.objects(folder)} == kept
    assert_state(process.repository.latest().load(), 2)


def _forget_commit(process: Process) -> None:
    """Put the newest row back to ``aborted``, as a catalog restored from a backup would have it."""
    path = process.site.sql().url.removeprefix("sqlite:///")
    with sqlite3.connect(path) as connection:
        triggers = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
        for name, _ in triggers:
            connection.execute(f'DROP TRIGGER "{name}"')
        connection.execute(
            "UPDATE generations SET state = 'aborted', commit_seq = NULL, committed_at = NULL, commit_fence = NULL, "
            "proven_at = NULL, manifest_name = NULL, manifest_digest = NULL, manifest_bytes = NULL, durable_at = NULL, "
            "nbytes = NULL, parent_key = NULL, aborted_at = created_at, abort_stage = 'recover', "
            "abort_reason = 'the backup is older' WHERE id = (SELECT MAX(id) FROM generations)"
        )
        connection.execute("DELETE FROM generation_packs WHERE generation_id = (SELECT MAX(id) FROM generations)")
        connection.execute("UPDATE runs SET next_commit_seq = 2")
        for _, sql in triggers:
            connection.execute(sql)
    connection.close()


def test_an_aborted_verdict_closes_a_key_for_ever(place: Place) -> None:
    _save(place.open(), 1)
    process = _leave_aborted(place, 2)
    row = process.row()
    assert close_aborted(process.site, row)
    assert close_aborted(process.site, row)
    with pytest.raises(Conflict):
        process.backend.create(f"runs/{row.run_key}/{row.key}/COMMIT.json", b"something else")


# -- what retire refuses ------------------------------------------------------------------------------
def test_retire_refuses_what_somebody_needs(place: Place) -> None:
    process = place.open()
    _save(process, 1, 2, 3, 4, 5, 6)
    catalog = process.site.sql()
    ids = [row.id for row in process.rows()]
    catalog.pin(ids[0], reason="paper")
    catalog.tag(ids[1], "best")
    reader = catalog.open_reader(ids[2], host="elsewhere", pid=1, ttl_seconds=600)
    heir = process.checkpointer()
    heir.restore(dict.fromkeys(state_of(0)), at=ids[3], strict=False)
    rules = {ids[0]: "pinned", ids[1]: "best", ids[2]: "read by", ids[3]: "restored from", ids[5]: "newest proven"}
    for number, why in rules.items():
        with pytest.raises(Conflict, match=why):
            collecting.retire(process.site, number)
    collecting.retire(process.site, ids[4])
    assert len(_collect(process).items) == 3
    for row in process.rows():
        if row.id != ids[4]:
            assert_state(process.repository.generation(row.id).load(), row.step)

    heir.close()
    catalog.unpin(ids[0])
    catalog.untag(ids[1], "best")
    catalog.close_reader(reader)
    for number in ids[:4]:
        collecting.retire(process.site, number)
    _collect(process)
    assert [row.state for row in process.rows()] == [*[State.DELETED] * 5, State.COMMITTED]
    assert_state(process.repository.latest().load(), 6)


def test_the_last_proven_generation_of_a_run_never_goes(place: Place) -> None:
    process = place.open()
    _save(process, 1)
    with pytest.raises(Conflict, match="newest proven"):
        collecting.retire(process.site, process.row().id)
    process.catalog.quarantine(process.row().id, reason="loss spike")
    with pytest.raises(Conflict, match="newest proven"):
        collecting.retire(process.site, process.row().id)


def test_a_reader_at_work_is_protected_while_it_reads(place: Place) -> None:
    process = place.open()
    _save(process, 1, 2)
    hold = threading.Event()
    fault = process.backend.add(Fault("read_into", hold=hold, when=lambda call: process.rows()[0].key in call.key))
    found: list[Any] = []
    reader = threading.Thread(target=lambda: found.append(process.repository.generation(process.rows()[0].id).load()))
    reader.start()
    assert fault.reached.wait(10)
    with pytest.raises(Conflict, match=f"pid {os.getpid()}"):
        collecting.retire(process.site, process.rows()[0].id)
    hold.set()
    reader.join()
    assert_state(found[0], 1)
    collecting.retire(process.site, process.rows()[0].id)


def test_packs_that_another_generation_refers_to_stay_until_it_goes(place: Place) -> None:
    process = place.open()
    _save(process, 1)
    first = process.row()
    real = process.site.sql().mark_durable

    def refer(generation_id: int, facts: Any, *, fence: int) -> GenerationRecord:
        """Step 2 reuses the pack of step 1 beside its own."""
        shared = process.site.sql().packs(first.id)[0]
        foreign = PackRecord(first.key, shared.name, 0, shared.nbytes, shared.header_digest)
        return real(generation_id, dataclasses.replace(facts, packs=(*facts.packs, foreign)), fence=fence)

    process.catalog.mark_durable = refer  # type: ignore[method-assign]
    _save(process, 2)
    del process.catalog.mark_durable
    _save(process, 3)
    collecting.retire(process.site, first.id)
    plan = _collect(process, dry_run=True)
    assert not [item for item in plan.items if item.object.endswith(".safetensors")]
    assert _collect(process).items == plan.items
    assert _files(process, first) == ["COMMIT.json", "RETIRED.json", "r00000-p000.safetensors"]
    assert not _collect(process, dry_run=True).items
    collecting.retire(process.site, process.rows()[1].id)
    _collect(process)
    _collect(process)
    assert _files(process, first) == ["COMMIT.json", "RETIRED.json"]
    assert_state(process.repository.latest().load(), 3)


# -- gc beside others ---------------------------------------------------------------------------------
def test_gc_leaves_a_save_in_flight_alone(place: Place) -> None:
    """FR-032: a writer stopped before its commit, gc, and the writer goes on."""
    hold = threading.Event()
    process = place.open()
    _save(process, 1)
    fault = process.backend.add(Fault("create", hold=hold, when=named(".json.zst")))
    with process.checkpointer() as checkpointer:
        pending = checkpointer.save(state_of(2), step=2)
        assert fault.reached.wait(10)
        report = _collect(place.open())
        assert (report.items, report.unknown) == ((), ())
        hold.set()
        assert pending is not None
        assert_state(pending.result().load(), 2)
        assert pending.result().verify().ok


def test_gc_under_a_launch_that_was_overtaken_makes_its_save_fail_cleanly(place: Place) -> None:
    hold = threading.Event()
    process = place.open()
    _save(process, 1)
    fault = process.backend.add(Fault("create", hold=hold, when=named("part.json")))
    checkpointer = process.checkpointer()
    pending = checkpointer.save(state_of(2), step=2)
    assert fault.reached.wait(10)
    other = place.open()
    with other.checkpointer(takeover=True):
        pass
    assert _collect(other).items
    hold.set()
    assert pending is not None
    assert isinstance(pending.exception(), SaveFailed)
    checkpointer.close()
    _collect(other)
    assert ended(other.row())
    assert _files(other, other.row()) == ["COMMIT.json"]
    assert_state(other.repository.latest().load(), 1)


def test_leftovers_of_unfinished_creates_go_only_when_no_launch_lives(place: Place) -> None:
    process = place.open()
    _save(process, 1)
    with process.checkpointer():
        process.backend.calls.clear()
        _collect(process)
        assert "sweep_debris" not in [call.op for call in process.backend.calls]
    _collect(process)
    assert "sweep_debris" in [call.op for call in process.backend.calls]


def test_something_removed_by_hand_counts_as_gone(place: Place) -> None:
    """FR-037."""
    process = place.open()
    _save(process, 1, 2)
    first = process.rows()[0]
    process.backend._inner.delete(f"runs/{first.run_key}/{first.key}/r00000-p000.safetensors")  # type: ignore[attr-defined]
    collecting.retire(process.site, first.id)
    assert len(_collect(process).items) == 2
    assert process.rows()[0].state is State.DELETED
    _save(process, 3)


# -- killed ---------------------------------------------------------------------------------------------
def _prepare(place: Place) -> Process:
    """One retired generation, one aborted, one that stays."""
    _save(place.open(), 1, 2)
    process = _leave_aborted(place, 3)
    collecting.retire(process.site, process.rows()[0].id)
    return process


def _check_collected(process: Process) -> None:
    first, kept, aborted = process.rows()
    assert [row.state for row in (first, kept, aborted)] == [State.DELETED, State.COMMITTED, State.DELETED]
    assert _files(process, first) == ["COMMIT.json", "RETIRED.json"]
    assert _files(process, aborted) == ["COMMIT.json"]
    assert_state(process.repository.latest().load(), 2)
    assert process.repository.latest().verify().ok


@pytest.mark.parametrize("timing", ["before", "after"])
@pytest.mark.parametrize(("op", "nth"), [("delete", 1), ("delete", 2), ("delete", 3), ("delete", 4), ("create", 1)])
def test_a_killed_gc_is_finished_by_the_next(place: Place, op: str, nth: int, timing: Any) -> None:
    _prepare(place)
    dying = place.open()
    dying.backend.add(Fault(op, error=dying.kill, nth=nth, timing=timing))
    with pytest.raises(BackendError):
        _collect(dying)
    fresh = place.open()
    assert_state(fresh.repository.latest().load(), 2)
    _collect(fresh)
    _check_collected(fresh)


@pytest.mark.parametrize("timing", ["before", "after"])
@pytest.mark.parametrize("nth", [1, 2])
def test_a_gc_killed_at_the_row_is_finished_by_the_next(place: Place, nth: int, timing: Any) -> None:
    _prepare(place)
    dying = place.open(sql=[Fault("mark_swept", error=dead_catalog, nth=nth, timing=timing)])
    with pytest.raises(Exception, match="dead"):
        _collect(dying)
    fresh = place.open()
    _collect(fresh)
    _check_collected(fresh)


def test_a_damaged_verdict_blocks_neither_the_next_launch_nor_gc_and_stays_where_it_is(place: Place) -> None:
    _save(place.open(), 1)
    dead = place.open()
    dead.backend.add(Fault("create", error=dead.kill, when=named("part.json")))
    pending = dead.checkpointer(takeover=True).save(state_of(2), step=2)
    assert pending is not None
    pending.exception()
    fresh = place.open()
    row = fresh.row()
    fresh.site.backend.create(f"runs/{row.run_key}/{row.key}/COMMIT.json", b"{torn")
    holder = fresh.catalog.live_launch("run")
    fresh.catalog.close_launch(holder.id)
    dry = recovering.recover(fresh.site, "run", dry_run=True, acquire=_never)
    assert [(action.action, "damaged" in action.reason) for action in dry.actions] == [("aborted", True)]
    with fresh.checkpointer(takeover=True) as checkpointer:
        checkpointer.save(state_of(3), step=3)
    before = _files(fresh, row)
    for dry_run in (True, False):
        report = _collect(fresh, dry_run=dry_run)
        assert [text.startswith(f"run #{row.id}: ") for text in report.damaged] == [True]
    assert _files(fresh, row) == before


def _never(run: str, token: str) -> Any:
    raise AssertionError("a dry run takes no lease")


def test_however_a_root_is_spelled_nothing_of_it_is_a_candidate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FR-034: live objects and candidates are compared by one form of their keys."""
    root = tmp_path / "r"
    for step in (1, 2):
        ckptfmt.save(state_of(step), root, step=step)
    monkeypatch.chdir(tmp_path)
    for spelling in (f"file://{root}", f"file://{root}/", "./r", "r/", f"{root}/../r", str(root)):
        with ckptfmt.open(spelling) as repository:
            report = repository.gc(dry_run=True)
            assert (report.items, report.unknown) == ((), ()), spelling
            repository.gc(dry_run=False)
            assert repository.latest().verify().ok
