"""The catalog was put back from a copy while the work went on: nobody is taken for somebody else, nothing wedges."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
from error_chain import chain_of
from lifecycle_rig import Place, Process, assert_state, named, state_of

from ckptfmt.engine import contradictions, governing, process, verdicts
from ckptfmt.engine.keep import gc as collecting
from ckptfmt.engine.keep.rebuild import Order, rebuild
from ckptfmt.engine.reports import RebuildReport
from ckptfmt.errors import CatalogBehind, Fenced, OutcomeUnknown, Unavailable
from ckptfmt.format import layout, verdict
from ckptfmt.format.states import State
from ckptfmt.ports.records import GenerationRecord
from ckptfmt.testing.catalog_job import Job, request
from ckptfmt.testing.faults import Fault


def _copy(place: Place) -> Path:
    return Path(shutil.copy(place.folder / "catalog.sqlite", place.folder / "copy.sqlite"))


def _put_back(place: Place, copy: Path) -> None:
    """As an operator does: the file is replaced."""
    copy.replace(place.folder / "catalog.sqlite")


def _save(process: Process, *steps: int, takeover: bool = True) -> None:
    with process.checkpointer(takeover=takeover) as checkpointer:
        for step in steps:
            checkpointer.save(state_of(step), step=step).result()


def _dies_at(place: Place, op: str, step: int, *, tags: Sequence[str] = ()) -> GenerationRecord:
    """A process saves, and dies before the catalog hears of ``op``."""
    dead = place.open()
    dead.catalog.add(Fault(op, error=dead.kill))
    pending = dead.checkpointer(takeover=True).save(state_of(step), step=step, tags=tags)
    assert pending is not None
    assert pending.exception() is not None
    return next(row for row in dead.catalog._inner.generations() if row.step == step)


def _merge(process: Process) -> RebuildReport:
    claims = governing.all_claims(process.site.backend)
    return rebuild(process.site, Order(how="merge", location="external", claims=claims, require_idle=False))


def _let_go(process: Process) -> None:
    process.site.sql().set_retention_hold("run", False)


def _takes_its_number(process: Process) -> GenerationRecord:
    """A launch that knows nothing commits the next number in the catalog."""
    catalog = process.catalog._inner
    holder = catalog.live_launch("run")
    launch = catalog.acquire_launch(
        "run", request(), lease_seconds=0.001, displace=None if holder is None else holder.id
    )
    return Job(catalog, "run", launch).committed(99)


def _durable_then_committed(place: Place) -> tuple[GenerationRecord, Process]:
    """Generation 2 is durable in the catalog, committed as number 2 on storage. The process was opened before."""
    _save(place.open(), 1)
    row = _dies_at(place, "commit", 2, tags=["best"])
    assert row.state is State.DURABLE
    copy = _copy(place)
    late = place.open()
    fresh = place.open()
    _save(fresh, 3)
    assert fresh.site.sql().generation(row.id).commit_seq == 2  # type: ignore[union-attr]
    _put_back(place, copy)
    return row, late


# -- an aborted verdict on storage ----------------------------------------------------------------------
def test_a_save_that_storage_calls_aborted_has_no_outcome(place: Place) -> None:
    process = place.open()

    def somebody_aborted_it() -> Unavailable:
        row = process.row()
        record = verdict.encode_commit(verdicts.aborted_of(process.site, row))
        process.backend._inner.create(f"{verdicts.folder_of(row)}/COMMIT.json", record)
        return Unavailable("lost")

    process.backend.add(Fault("create", error=somebody_aborted_it, when=named("COMMIT.json")))
    pending = process.checkpointer().save(state_of(1), step=1)
    assert pending is not None
    error = pending.exception()
    assert isinstance(error, OutcomeUnknown)
    assert "says that it was aborted" in str(error)
    assert "db rebuild --merge" in str(error)
    (action,) = process.repository.recover().actions
    assert (action.action, action.generation_id) == ("left", process.row().id)
    assert "says that it was aborted" in action.reason
    with pytest.raises(CatalogBehind, match="aborted on storage, committed in the catalog"):
        place.open()


def test_an_aborted_verdict_on_what_is_open_tells_that_the_catalog_was_put_back(place: Place) -> None:
    row = _dies_at(place, "mark_durable", 1)
    copy = _copy(place)
    assert row.state is State.WRITING
    fresh = place.open()
    fresh.site.sql().abort(row.id, stage="recover", rank=None, reason="incomplete", fence=row.fence)
    collecting.collect(fresh.site, dry_run=False)
    _put_back(place, copy)
    with pytest.raises(CatalogBehind, match=f"#{row.id} .aborted on storage, writing in the catalog"):
        place.open()
    with pytest.raises(CatalogBehind):
        fresh.repository.gc()
    _merge(fresh)
    _save(place.open(), 2)


# -- numbers that were given twice ----------------------------------------------------------------------
def _taken_over(process: Process) -> None:
    process.checkpointer(takeover=True).close()


def _recovered(process: Process) -> None:
    told = process.repository.recover(dry_run=True).actions
    done = process.repository.recover().actions
    assert told == done
    ((action, reason),) = [(action.action, action.reason) for action in done if action.generation_id == 2]
    assert action == "left"
    assert "belongs to generation 3" in reason
    assert "db rebuild --merge" in reason


@pytest.mark.parametrize("settle", [_taken_over, _recovered])
def test_a_row_whose_number_was_given_twice_is_passed_over(
    place: Place, settle: Callable[[Process], None], caplog: pytest.LogCaptureFixture
) -> None:
    row, late = _durable_then_committed(place)
    other = _takes_its_number(late)
    assert (row.id, other.id, other.commit_seq) == (2, 3, 2)
    with caplog.at_level(logging.ERROR):
        settle(late)
    assert any("passed over" in line and "db rebuild --merge" in line for line in caplog.messages)
    assert late.site.sql().generation(row.id).state is State.DURABLE  # type: ignore[union-attr]
    _save(late, 4)
    assert_state(late.repository.latest().load(), 4)


def test_gc_passes_over_what_it_cannot_adopt(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    row, late = _durable_then_committed(place)
    _takes_its_number(late)
    catalog = late.site.sql()
    (run,) = catalog.runs()
    catalog.abort(row.id, stage="s", rank=None, reason="r", fence=run.fence)
    monkeypatch.setattr(contradictions, "require_none", lambda site: None)  # as where a rebuild has told of it
    there = late.objects()
    report = collecting.collect(late.site, dry_run=False, grace=timedelta(0))
    (told,) = report.damaged
    assert f"#{row.id}" in told
    assert "belongs to generation 3" in told
    assert "db rebuild --merge" in told
    assert (report.items, report.adopted) == ((), ())
    assert late.objects() == there


def test_a_merge_gives_the_save_that_it_adopts_its_tags(place: Place) -> None:
    row, late = _durable_then_committed(place)
    catalog = late.site.sql()
    assert catalog.tagged("run", "best") is None
    actions = {one.generation_id: one.action for one in _merge(late).changes}
    assert actions[row.id] == "adopted"
    best = catalog.tagged("run", "best")
    assert best is not None
    assert best.id == row.id


# -- what a dry run foretells ---------------------------------------------------------------------------
def _foretold(late: Process) -> list[tuple[int, str]]:
    """What ``recover`` does, which its dry run must have said, with the same reasons."""
    told, done = (late.repository.recover(dry_run=dry_run).actions for dry_run in (True, False))
    assert told == done
    return [(action.generation_id, action.action) for action in done]


def _lapse(late: Process) -> None:
    holder = late.catalog._inner.live_launch("run")
    assert holder is not None
    late.catalog.close_launch(holder.id)


def _replace(late: Process, row: GenerationRecord, name: str, data: bytes) -> None:
    key = f"{verdicts.folder_of(row)}/{name}"
    late.backend._inner.delete(key)
    late.backend._inner.create(key, data)


@pytest.mark.parametrize("damage", ["torn", "of another generation"])
def test_a_dry_run_leaves_what_has_a_damaged_tombstone(place: Place, damage: str) -> None:
    row, late = _retired_meanwhile(place)
    _lapse(late)
    foreign = verdict.Retired(
        repository=late.site.repository, run="run", id=9, key="f" * 32, retired_at="2026-01-01T00:00:00Z"
    )
    _replace(late, row, layout.RETIRED, b"{torn" if damage == "torn" else verdict.encode_retired(foreign))
    assert _foretold(late) == [(row.id, "left")]


def test_a_dry_run_leaves_what_cannot_be_adopted(place: Place) -> None:
    row, late = _durable_then_committed(place)
    _lapse(late)
    (name,) = [info.key for info in late.backend.list(verdicts.folder_of(row)) if "manifest-" in info.key]
    late.backend._inner.delete(name)
    assert _foretold(late) == [(row.id, "left")]


@pytest.mark.parametrize("holder", ["alive", "gone"])
def test_a_dry_run_asks_who_holds_the_run(place: Place, holder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row = _dies_at(place, "commit", 1)
    late = place.open()
    catalog = late.catalog._inner
    held = catalog.live_launch("run")
    catalog.acquire_launch("run", request(), lease_seconds=60, displace=held.id)
    monkeypatch.setattr(process, "is_gone", lambda launch: holder == "gone")
    assert _foretold(late) == [(row.id, "left" if holder == "alive" else "committed")]


def _committed_without_proof(place: Place) -> tuple[GenerationRecord, Process]:
    process = place.open()
    process.backend.add(Fault("create", error=process.kill, when=named("COMMIT.json")))
    pending = process.checkpointer().save(state_of(1), step=1)
    assert pending is not None
    pending.exception()
    late = place.open()
    row = late.row()
    assert (row.state, row.proven_at) == (State.COMMITTED, None)
    return row, late


@pytest.mark.parametrize("what", ["pack", "torn", "aborted", "of another commit"])
def test_a_dry_run_leaves_what_cannot_be_proved(place: Place, what: str) -> None:
    row, late = _committed_without_proof(place)
    folder, storage = verdicts.folder_of(row), late.backend._inner
    proof = verdicts.commit_of(late.site, row)
    found = {
        "torn": b"{torn",
        "aborted": verdict.encode_commit(verdicts.aborted_of(late.site, row)),
        "of another commit": verdict.encode_commit(msgspec.structs.replace(proof, commit_seq=7)),
    }
    if what == "pack":
        storage.delete(f"{folder}/r00000-p000.safetensors")
    else:
        storage.create(f"{folder}/{layout.COMMIT}", found[what])
    before = storage.list("")
    assert _foretold(late) == [(row.id, "left")]
    assert storage.list("") == before


def test_a_dry_run_tells_a_proof_that_is_there_and_not_noted(place: Place) -> None:
    row, late = _committed_without_proof(place)
    proof = verdict.encode_commit(verdicts.commit_of(late.site, row))
    late.backend._inner.create(f"{verdicts.folder_of(row)}/{layout.COMMIT}", proof)
    (action,) = late.repository.recover(dry_run=True).actions
    assert "was there, and not noted" in action.reason
    assert _foretold(late) == [(row.id, "proved")]


# -- retired meanwhile ----------------------------------------------------------------------------------
def _retired_meanwhile(place: Place) -> tuple[GenerationRecord, Process]:
    """Generation 2 is durable in the catalog, committed and retired on storage."""
    _save(place.open(), 1)
    row = _dies_at(place, "commit", 2)
    copy = _copy(place)
    late = place.open()
    fresh = place.open()
    _save(fresh, 3)
    collecting.retire(fresh.site, row.id)
    _put_back(place, copy)
    return row, late


@pytest.mark.parametrize("opener", ["takeover", "recover"])
def test_what_was_committed_and_retired_meanwhile_is_settled(place: Place, opener: str) -> None:
    row, late = _retired_meanwhile(place)
    catalog = late.site.sql()
    if opener == "takeover":
        _taken_over(late)
    else:
        holder = catalog.live_launch("run")
        assert holder is not None
        catalog.close_launch(holder.id)  # its lease has lapsed
        for dry_run in (True, False):
            (action,) = late.repository.recover(dry_run=dry_run).actions
            assert (action.generation_id, action.action) == (row.id, "aborted")
            assert "retired since" in action.reason
        assert not late.repository.recover().actions
    settled = catalog.generation(row.id)
    assert settled is not None
    assert settled.state is State.ABORTED
    assert settled.abort_reason is not None
    assert "number 2 of epoch 1" in settled.abort_reason
    # A rebuild writes down what it was.
    _merge(late)
    assert catalog.generation(row.id).state is State.RETIRED  # type: ignore[union-attr]
    _let_go(late)
    fresh = place.open()
    assert fresh.repository.gc(dry_run=False).waiting
    assert collecting.collect(fresh.site, dry_run=False, grace=timedelta(0)).items
    assert_state(fresh.repository.latest().load(), 3)


def test_gc_removes_what_was_retired_meanwhile_after_its_grace(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    row, late = _retired_meanwhile(place)
    _taken_over(late)
    monkeypatch.setattr(contradictions, "require_none", lambda site: None)
    assert not late.repository.gc(dry_run=False).items
    (told,) = late.repository.gc(dry_run=False).waiting
    assert f"#{row.id} (due" in told
    report = collecting.collect(late.site, dry_run=False, grace=timedelta(0))
    assert {item.generation_id for item in report.items} == {row.id}
    folder = verdicts.folder_of(row)
    assert late.objects(folder) == [f"{folder}/COMMIT.json", f"{folder}/RETIRED.json"]
    assert late.site.sql().generation(row.id).state is State.DELETED  # type: ignore[union-attr]


# -- a launch that nobody remembers ---------------------------------------------------------------------
def test_a_forgotten_launch_is_not_taken_for_the_one_that_got_its_id(place: Place) -> None:
    zombie, newer = place.open(), place.open()
    zombie.site.sql().ensure_run("run", layout.run_key("run"))
    copy = _copy(place)
    old = zombie.checkpointer()
    _put_back(place, copy)
    new = newer.checkpointer()
    assert (old._context.launch.id, old._context.launch.fence) == (new._context.launch.id, new._context.launch.fence)
    pending = old.save(state_of(1), step=1)
    assert pending is not None
    error = pending.exception()
    assert any(isinstance(one, Fenced) for one in chain_of(error)), error
    assert zombie.rows() == []
    new.save(state_of(2), step=2).result()
    assert [(row.step, row.state) for row in newer.rows()] == [(2, State.COMMITTED)]
