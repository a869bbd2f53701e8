"""The grace between the tombstone and the deletion counts from when the tombstone was durable."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from datetime import datetime, timedelta

import pytest
from lifecycle_rig import Place, Process, assert_state, state_of

import ckptfmt
from ckptfmt.engine.keep import gc as collecting
from ckptfmt.engine.sweep import CLOSED, closed_at
from ckptfmt.format.states import State
from ckptfmt.ports.records import GenerationRecord
from ckptfmt.testing.faults import Fault


def _two_saves(place: Place) -> tuple[Process, GenerationRecord]:
    process = place.open()
    with process.checkpointer() as checkpointer:
        for step in (1, 2):
            checkpointer.save(state_of(step), step=step)
    return process, process.rows()[0]


def _hours_ago(place: Place, generation_id: int, hours: int) -> None:
    """Retired so many hours earlier than the catalog says. Its triggers know no such thing."""
    with closing(sqlite3.connect(place.folder / "catalog.sqlite")) as database, database:
        triggers = database.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
        for name, _ in triggers:
            database.execute(f'DROP TRIGGER "{name}"')
        query = "SELECT retired_at FROM generations WHERE id = ?"
        ((stored,),) = database.execute(query, (generation_id,))
        earlier = re.sub(r"^(\S+)([T ])(\d\d)", lambda found: _earlier(*found.groups(), hours=hours), stored)
        assert earlier < stored
        database.execute("UPDATE generations SET retired_at = ? WHERE id = ?", (earlier, generation_id))
        for _, statement in triggers:
            database.execute(statement)


def _earlier(day: str, between: str, hour: str, *, hours: int) -> str:
    moment = datetime.fromisoformat(f"{day}T{hour}:00:00") - timedelta(hours=hours)
    return f"{moment:%Y-%m-%d}{between}{moment:%H}"


def _later(monkeypatch: pytest.MonkeyPatch, process: Process, hours: int) -> None:
    """Let gc look at a clock that is so much further."""
    now = process.catalog._inner.database_now
    monkeypatch.setattr(process.catalog._inner, "database_now", lambda: now() + timedelta(hours=hours))


def test_a_retirement_that_died_before_its_tombstone_keeps_its_grace(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, first = _two_saves(place)
    process.catalog.retire(first.id)  # the process dies before it makes the tombstone
    _hours_ago(place, first.id, 2)
    with ckptfmt.open(place.url, mode="r", catalog="none") as by_proof:
        reading = by_proof.generation(first.id)  # rightly: there is no tombstone
        plan = process.repository.gc()
        assert not plan.items
        assert any(f"#{first.id}" in text for text in plan.waiting)
        assert closed_at(process.site, first) is None
        report = process.repository.gc(dry_run=False)
        assert not report.items
        assert any(f"#{first.id} (due " in text for text in report.waiting)
        assert process.repository.gc(dry_run=False).waiting == report.waiting  # looking again takes no longer
        assert_state(reading.load(), 1)
    _later(monkeypatch, process, 2)
    assert len(process.repository.gc(dry_run=False).items) == 3
    assert process.rows()[0].state is State.DELETED


def test_a_retirement_that_died_right_after_its_tombstone_keeps_its_grace(place: Place) -> None:
    process, first = _two_saves(place)
    process.catalog.retire(first.id)
    _hours_ago(place, first.id, 2)
    process.catalog.add(Fault("note", error=process.kill))
    with pytest.raises(Exception, match="dead"):
        collecting.retire(process.site, first.id)  # once more, and it dies again
    fresh = place.open()
    assert [key for key in fresh.objects() if key.endswith("RETIRED.json")]
    assert not fresh.repository.gc(dry_run=False).items
    assert closed_at(fresh.site, first) is not None


def test_the_note_comes_after_the_tombstone_and_once(place: Place) -> None:
    process, first = _two_saves(place)
    process.catalog.add(Fault("note", error=process.kill))
    with pytest.raises(Exception, match="dead"):
        collecting.retire(process.site, first.id)
    kinds = [event.kind for event in process.catalog._inner.events(generation_id=first.id)]
    assert kinds[-1] == "retire"
    fresh = place.open()
    for _ in range(2):
        collecting.retire(fresh.site, first.id)
        fresh.repository.gc(dry_run=False)
        assert not fresh.repository.recover().actions
    assert fresh.events().count(CLOSED) == 1


def test_a_tombstone_that_is_gone_is_made_again_and_its_grace_begins_anew(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, first = _two_saves(place)
    collecting.retire(process.site, first.id)
    before = closed_at(process.site, first)
    process.backend.delete(f"runs/{first.run_key}/{first.key}/RETIRED.json")
    report = process.repository.gc(dry_run=False)
    after = closed_at(process.site, first)
    assert before is not None
    assert after is not None
    assert after > before
    assert not report.items
    _later(monkeypatch, process, 2)
    assert len(process.repository.gc(dry_run=False).items) == 3


def test_what_stands_in_the_place_of_a_tombstone_stops_nothing_else(place: Place) -> None:
    process, first = _two_saves(place)
    process.catalog.retire(first.id)
    process.backend.create(f"runs/{first.run_key}/{first.key}/RETIRED.json", b'{"something": "else"}')
    report = collecting.collect(process.site, dry_run=False, grace=timedelta(0))
    assert not report.items
    assert any(f"#{first.id}: its tombstone cannot be made" in text for text in report.damaged)
    assert process.rows()[0].state is State.RETIRED
    with ckptfmt.open(place.url, mode="r", catalog="none") as by_proof, pytest.raises(ckptfmt.CkptError):
        by_proof.generation(first.id)
