"""Garbage on the tiers beside the durable one goes in the same order as there: the tombstone first."""

from __future__ import annotations

from datetime import timedelta

import pytest
from tiers_rig import Process, TieredPlace, named, state_of

import ckptfmt
from ckptfmt.engine import process as processes
from ckptfmt.engine.keep import gc
from ckptfmt.errors import AccessDenied, Unavailable
from ckptfmt.format import layout
from ckptfmt.testing.faults import Fault

NOW = timedelta(0)
PACK = layout.pack_name(0, 0)


def saved(place: TieredPlace, *seeds: int) -> Process:
    process = place.open(replicas=1)
    with process.checkpointer() as checkpointer:
        for seed in seeds:
            checkpointer.save(state_of(seed), step=seed).result(10)  # type: ignore[union-attr]
    return process


def test_a_retired_generation_goes_from_its_replicas_too(place: TieredPlace) -> None:
    process = saved(place, 1, 2)
    first, url = process.rows()[0], place.replica_urls[0]
    gc.retire(process.site, first.id)
    assert layout.RETIRED in place.names(url, first.key), "nobody opens it there any more"
    assert PACK in place.names(url, first.key)
    waiting = gc.collect(process.site, dry_run=False).waiting
    assert any("replica" in line for line in waiting)
    assert PACK in place.names(url, first.key), "the grace protects readers there"
    listed = gc.collect(process.site, dry_run=True, grace=NOW)
    done = gc.collect(process.site, dry_run=False, grace=NOW)
    assert {(item.object, item.reason) for item in listed.items} == {(item.object, item.reason) for item in done.items}
    assert place.names(url, first.key) == place.names(place.url, first.key) == {layout.COMMIT, layout.RETIRED}
    assert process.site.sql().replicas(first.id) == []
    assert not gc.collect(process.site, dry_run=True, grace=NOW).items
    assert ckptfmt.load(f"{url}#run", catalog="none")["n"] == [2, "x"]


def test_a_replica_that_was_away_gets_its_tombstone_first(place: TieredPlace) -> None:
    process = saved(place, 1, 2)
    first, url = process.rows()[0], place.replica_urls[0]
    process.replica().add(Fault("create", error=lambda: Unavailable("away"), times=None, when=named(layout.RETIRED)))
    gc.retire(process.site, first.id)
    done = gc.collect(process.site, dry_run=False, grace=NOW)
    assert place.names(place.url, first.key) == {layout.COMMIT, layout.RETIRED}
    assert PACK in place.names(url, first.key)
    assert any("away" in line for line in done.waiting)
    process.replica().heal()
    before = len(process.replica().calls)
    gc.collect(process.site, dry_run=False, grace=NOW)
    order = [(call.op, call.key.rpartition("/")[2]) for call in process.replica().calls[before:] if call.mutates]
    assert order.index(("create", layout.RETIRED)) < order.index(("delete", PACK))
    assert place.names(url, first.key) == {layout.COMMIT, layout.RETIRED}


def test_a_replica_that_was_not_opened_is_swept_later(place: TieredPlace) -> None:
    saved(place, 1, 2)
    url = place.replica_urls[0]
    without = place.open()
    first = without.rows()[0]
    gc.retire(without.site, first.id)
    gc.collect(without.site, dry_run=False, grace=NOW)
    assert PACK in place.names(url, first.key)
    again = place.open(replicas=1)
    gc.collect(again.site, dry_run=False, grace=NOW)
    assert place.names(url, first.key) == {layout.COMMIT, layout.RETIRED}


def test_what_an_aborted_save_left_on_a_replica_goes(place: TieredPlace) -> None:
    process = place.open(replicas=1, durable_on=2)
    with process.checkpointer() as checkpointer:
        process.backend.add(Fault("create", error=lambda: AccessDenied("no"), when=named(layout.part_name(0))))
        pending = checkpointer.save(state_of(1), step=1)
        assert pending is not None
        assert pending.exception(20) is not None
    (row,) = process.rows()
    assert place.names(place.replica_urls[0], row.key) == {PACK}
    gc.collect(process.site, dry_run=False, grace=NOW)
    assert place.names(place.replica_urls[0], row.key) == {layout.COMMIT}


def test_what_a_dead_launch_staged_goes_once_it_is_aborted(place: TieredPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "is_gone", lambda launch: True)
    process = place.open()
    process.stage.add(Fault("create", error=process.die, when=named("staged")))
    pending = process.checkpointer().save(state_of(1), step=1)
    assert pending is not None
    pending.exception(30)
    place.open(staged=False).repository.recover()
    process = place.open()
    (row,) = process.rows()
    assert PACK in place.names(place.stage_url, row.key)
    listed = gc.collect(process.site, dry_run=True, grace=NOW)
    assert any("on stage" in item.reason for item in listed.items)
    gc.collect(process.site, dry_run=False, grace=NOW)
    assert place.names(place.stage_url, row.key) == set()


def test_gc_takes_nothing_that_is_committed_or_under_way(place: TieredPlace) -> None:
    process = saved(place, 1, 2)
    before = {url: place.objects(url) for url in (place.url, place.stage_url, place.replica_urls[0])}
    done = gc.collect(process.site, dry_run=False, grace=NOW)
    assert (done.items, done.unknown, done.waiting, done.damaged) == ((), (), (), ())
    assert {url: place.objects(url) for url in before} == before


def test_strangers_are_told_and_stay(place: TieredPlace) -> None:
    process = saved(place, 1)
    folder = f"runs/{process.rows()[0].run_key}/{'ab' * 16}"
    for backend in (process.replica(), process.stage):
        backend.make_folder(folder)
        backend.create(f"{folder}/{PACK}", b"x")
    done = gc.collect(process.site, dry_run=False, grace=NOW)
    assert sorted(text.partition(" (on ")[2].split()[0] for text in done.unknown) == ["replica", "stage"]
    assert all(f"{folder}/{PACK}" in place.objects(url) for url in (place.stage_url, place.replica_urls[0]))


def test_a_replica_that_is_away_waits(place: TieredPlace) -> None:
    process = saved(place, 1)
    process.replica().add(Fault("list", error=lambda: Unavailable("away"), times=None))
    done = gc.collect(process.site, dry_run=False, grace=NOW)
    assert any("away" in line for line in done.waiting)


def test_the_catalog_calls_nothing_held_of_which_a_part_is_gone(place: TieredPlace) -> None:
    """The row that says so goes before the bytes: whoever dies in between leaves too much, never too little."""
    process = saved(place, 1, 2)
    first, catalog = process.rows()[0], process.site.sql()
    gc.retire(process.site, first.id)
    held = len(catalog.replicas(first.id))
    assert held
    process.replica().add(Fault("delete", error=lambda: Unavailable("away"), when=named(layout.part_name(0))))
    gc.collect(process.site, dry_run=False, grace=NOW)
    assert layout.part_name(0) in place.names(place.replica_urls[0], first.key), "the first one to go"
    assert catalog.replicas(first.id) == []
    gc.collect(process.site, dry_run=False, grace=NOW)
    assert place.names(place.replica_urls[0], first.key) == {layout.COMMIT, layout.RETIRED}
