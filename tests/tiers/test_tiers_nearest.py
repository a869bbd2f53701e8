"""Reading takes each chunk from the nearest tier that has it, and says what it found wrong (spec/tiers.md)."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reading_rig import CHUNK, Places, Watched, blank, laying, repair, same

from ckptfmt.backends.posix import PosixBackend
from ckptfmt.engine.nearest import RETRIES
from ckptfmt.engine.read_plan import GAP_BYTES, ReadUnit, Region, StoredBox, read_units
from ckptfmt.errors import Corrupt, NotFound, Unavailable
from ckptfmt.generation import Generation
from ckptfmt.testing.faults import Fault, FaultyBackend

Open = Callable[..., Places]


@pytest.fixture
def laid(tmp_path: Path) -> Iterator[Open]:
    with laying(tmp_path) as lay:
        yield lay


def _load(generation: Generation, here: Places) -> None:
    same(generation.load(), here.saved)


def _restore(generation: Generation, here: Places) -> None:
    live = blank()
    generation.restore(live)
    same(live, here.saved)


def _through_a_window(generation: Generation, here: Places) -> None:
    live = blank()
    generation.restore(live, atomic=False)
    same(live, here.saved)


def _slices(generation: Generation, here: Places) -> None:
    for name, value in here.saved.items():
        np.testing.assert_array_equal(generation[name][:], value)


WAYS = [_load, _restore, _through_a_window, _slices]
every_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__.strip("_"))


# -- which tier ----------------------------------------------------------------------------------------
@every_way
def test_what_lies_on_the_stage_is_read_there(laid: Open, way: Any) -> None:
    here = laid()
    here.pack(here.durable).unlink()
    generation = here.generation()
    way(generation, here)
    (source,) = generation._opened.nearest.log.since(_start(generation)).sources
    assert source.role == "stage"


def _start(generation: Generation) -> Any:
    return type(generation._opened.nearest.log)(()).mark()


def test_local_places_come_before_distant_ones(laid: Open) -> None:
    here = laid(replicas=2)
    here.wrapped[here.durable] = lambda plain: Watched(plain, local=False)
    here.wrapped[here.replicas[0]] = lambda plain: Watched(plain, local=False)
    tiers = here.generation(catalog="none")._opened.nearest.tiers
    roots = [str(here.stage), str(here.replicas[1]), str(here.durable), str(here.replicas[0])]
    assert [tier.backend.url.removeprefix("file://") for tier in tiers] == roots
    here.wrapped.clear()
    assert [tier.role for tier in here.generation()._opened.nearest.tiers] == ["stage", "durable", "replica", "replica"]


def test_a_restore_tells_what_came_from_where(laid: Open) -> None:
    here = laid()
    report = here.generation().restore(blank())
    (source,) = report.sources
    assert (source.role, source.nbytes) == ("stage", report.nbytes)
    assert report.damaged == ()
    assert report.retries == 0
    assert here.stage is not None
    assert source.url == PosixBackend(here.stage).url


def test_a_stage_that_holds_nothing_of_it_is_passed_over_in_silence(
    laid: Open, caplog: pytest.LogCaptureFixture
) -> None:
    here = laid()
    assert here.stage is not None
    here.pack(here.stage).unlink()
    with caplog.at_level(logging.INFO, "ckptfmt"):
        report = here.generation().restore(live := blank())
    same(live, here.saved)
    assert [source.role for source in report.sources] == ["durable"]
    assert report.damaged == ()
    assert not caplog.records


# -- damage ----------------------------------------------------------------------------------------------
@every_way
def test_each_chunk_comes_from_a_tier_where_it_is_whole(laid: Open, way: Any, caplog: pytest.LogCaptureFixture) -> None:
    """No tier has all of it."""
    here = laid()
    assert here.stage is not None
    here.damage(here.stage, "big", 0)
    here.damage(here.stage, "small")
    here.damage(here.durable, "big", 0)
    here.damage(here.durable, "big", 1)
    here.damage(here.replicas[0], "big", 2)
    here.damage(here.replicas[0], "small")
    generation = here.generation()
    with caplog.at_level(logging.WARNING, "ckptfmt"):
        way(generation, here)
    reading = generation._opened.nearest.log.since(_start(generation))
    assert {source.role for source in reading.sources} == {"stage", "durable", "replica"}
    assert {problem.tier for problem in reading.damaged} == {PosixBackend(r).url for r in (here.stage, here.durable)}
    assert {problem.kind for problem in reading.damaged} == {"corrupt"}
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2, "once for each object"
    assert all("is read from another place" in text and "offset" in text for text in told)


def test_damage_is_told_in_report_and_catalog(laid: Open) -> None:
    here = laid()
    assert here.stage is not None
    here.damage(here.stage, "big", 1)
    generation = here.generation(mode="w")
    report = generation.restore(live := blank())
    same(live, here.saved)
    (problem,) = report.damaged
    assert problem.tensor == "big"
    assert problem.offset == here.offset_of("big", 1)
    assert {(source.role, source.nbytes) for source in report.sources} == {
        ("stage", report.nbytes - CHUNK),
        ("durable", CHUNK),
    }
    catalog = generation._opened.site.sql()
    (event,) = [event for event in catalog.events(generation_id=generation.id) if event.kind == "damage"]
    assert event.detail["object"] == problem.object
    assert event.detail["tier"] == problem.tier
    assert event.detail["offset"] == problem.offset
    generation.restore(blank())
    assert len([event for event in catalog.events(run="r") if event.kind == "damage"]) == 1, "noted once"


def test_what_no_tier_has_fails_as_on_the_durable_one(laid: Open) -> None:
    here = laid()
    assert here.stage is not None
    for root in (here.stage, here.durable, *here.replicas):
        here.damage(root, "big", 1)
    live = blank()
    with pytest.raises(Corrupt, match=r"tried in vain as well: stage file://.*: corrupt, replica file://.*") as caught:
        here.generation().restore(live)
    assert (caught.value.tensor, caught.value.offset) == ("big", here.offset_of("big", 1))
    same(live, blank())


def test_one_place_alone_fails_as_ever(laid: Open) -> None:
    here = laid(stage=False, replicas=0)
    here.damage(here.durable, "big", 1)
    with pytest.raises(Corrupt) as caught:
        here.generation().load()
    assert "tried in vain" not in str(caught.value)


@every_way
@pytest.mark.parametrize("how", ["gone", "short"])
def test_a_pack_that_is_gone_or_short_is_read_elsewhere(laid: Open, way: Any, how: str) -> None:
    here = laid(stage=False)
    path = here.pack(here.durable)
    if how == "gone":
        path.unlink()
    else:
        os.truncate(path, path.stat().st_size - 1)
    generation = here.generation()
    way(generation, here)
    reading = generation._opened.nearest.log.since(_start(generation))
    assert [source.role for source in reading.sources] == ["replica"]
    (problem,) = reading.damaged
    assert problem.kind == {"gone": "object_missing", "short": "corrupt"}[how]
    assert problem.tier == PosixBackend(here.durable).url


def test_a_pack_that_goes_while_it_is_open_is_read_elsewhere(laid: Open) -> None:
    here = laid(stage=False)
    generation = here.generation()
    here.pack(here.durable).unlink()
    _restore(generation, here)


def test_a_pack_that_is_on_no_tier_is_named_at_opening(laid: Open) -> None:
    here = laid(stage=False)
    name = here.pack(here.durable).name
    here.pack(here.durable).unlink()
    here.pack(here.replicas[0]).unlink()
    with pytest.raises(NotFound, match=name):
        here.generation()


def test_the_manifest_is_read_from_a_replica_where_the_durable_one_lost_it(laid: Open) -> None:
    here = laid(stage=False)
    (path,) = (here.durable / here.folder).glob("manifest-*")
    path.write_bytes(path.read_bytes()[:-1])
    for _ in range(2):
        generation = here.generation()
        _load(generation, here)
        path.unlink(missing_ok=True)


# -- storage that fails --------------------------------------------------------------------------------------
@every_way
def test_a_tier_that_is_away_is_passed_over(laid: Open, way: Any) -> None:
    here = laid()
    assert here.stage is not None
    faulty: list[FaultyBackend] = []

    def away(plain: Any) -> FaultyBackend:
        faulty.append(FaultyBackend(plain, Fault("read_into", error=lambda: Unavailable("away"), times=None)))
        return faulty[-1]

    here.wrapped[here.stage] = away
    generation = here.generation()
    way(generation, here)
    reading = generation._opened.nearest.log.since(_start(generation))
    assert [source.role for source in reading.sources] == ["durable"]
    assert [problem.kind for problem in reading.damaged] == ["unavailable"]
    assert faulty[0].counts["read_into"] <= 4, "it is not asked for every range"


def test_what_was_damaged_on_its_way_is_read_once_more(laid: Open, caplog: pytest.LogCaptureFixture) -> None:
    here = laid(stage=False, replicas=0)
    watched: list[Watched] = []
    here.wrapped[here.durable] = lambda plain: watched.append(Watched(plain, flips=1)) or watched[-1]
    with caplog.at_level(logging.WARNING, "ckptfmt"):
        report = here.generation().restore(live := blank())
    same(live, here.saved)
    assert report.retries == 1
    assert report.damaged == ()
    (record,) = caplog.records
    assert "read once more" in record.getMessage()


def test_it_is_not_read_once_more_for_ever(laid: Open) -> None:
    here = laid(stage=False, replicas=0)
    watched: list[Watched] = []
    here.wrapped[here.durable] = lambda plain: watched.append(Watched(plain, flips=1000)) or watched[-1]
    generation = here.generation()
    with pytest.raises(Corrupt):
        generation["big"][:4096]
    assert watched[0].asked["read_into"] == 1 + RETRIES


def test_unverified_bytes_come_from_the_first_tier_that_can_be_read(laid: Open) -> None:
    here = laid()
    assert here.stage is not None
    here.damage(here.stage, "small")
    loaded = here.generation().load(verify=False)
    assert (loaded["small"] != here.saved["small"]).sum() == 1
    here.pack(here.stage).unlink()
    same(here.generation().load(verify=False), here.saved)


# -- repairs ------------------------------------------------------------------------------------------------
@every_way
@pytest.mark.parametrize("how", ["damaged", "gone"])
def test_a_repair_is_read_before_the_next_tier(laid: Open, way: Any, how: str) -> None:
    here = laid(stage=False)
    repair(here, here.durable, here.replicas[0])
    name = here.pack(here.durable)
    if how == "gone":
        name.unlink()
    else:
        data = bytearray(name.read_bytes())
        at = here.offset_of("big", 1)
        data[at] ^= 1
        name.write_bytes(data)
    generation = here.generation()
    way(generation, here)
    reading = generation._opened.nearest.log.since(_start(generation))
    assert [source.role for source in reading.sources] == ["durable"]
    (problem,) = reading.damaged
    assert problem.object.endswith(name.name)


def test_a_damaged_repair_is_passed_over(laid: Open) -> None:
    here = laid(stage=False, replicas=0)
    repair(here, here.durable, here.durable)
    (path,) = (here.durable / here.folder).glob("repair-*")
    path.write_bytes(path.read_bytes()[:-3])
    pack = here.pack(here.durable)
    pack.unlink()
    with pytest.raises(NotFound, match=pack.name):
        here.generation()


# -- from memory -------------------------------------------------------------------------------------------
def test_what_the_page_cache_shows_of_a_damaged_stage_is_read_elsewhere(laid: Open) -> None:
    here = laid()
    assert here.stage is not None
    here.damage(here.stage, "big", 1)
    here.pack(here.stage).read_bytes()
    report = here.generation().restore(live := blank())
    same(live, here.saved)
    assert [problem.tensor for problem in report.damaged] == ["big"]


# -- ranges ------------------------------------------------------------------------------------------------
def _box(offset: int, nbytes: int) -> StoredBox:
    digests = (b"",) * max(1, -(-nbytes // CHUNK))
    return StoredBox("t", (0,), (nbytes,), "p", 1 << 40, offset, nbytes, digests, CHUNK)


@pytest.mark.parametrize("seed", range(20))
def test_two_reads_share_no_byte(seed: int) -> None:
    """What one has compared with its digest, another, perhaps from a damaged place, must not write over."""
    rng = np.random.default_rng(seed)
    boxes, offset = [], int(rng.integers(0, 9000))
    for _ in range(40):
        nbytes = int(rng.choice([1, 100, 4096, 3 << 20, (5 << 20) + 1, (9 << 20) + 7, 2 * CHUNK]))
        boxes.append(_box(offset, nbytes))
        offset += nbytes + int(rng.choice([0, 0, 1, 4096, GAP_BYTES]))
    begin, end = boxes[0].offset // 4096 * 4096, -(-offset // 4096) * 4096
    units = read_units(Region("p", begin, end, 0, tuple(boxes)))
    for one, other in pairwise(units):
        assert one.stop <= other.start
    for unit in units:
        assert all(unit.start <= at and at + nbytes <= unit.stop for _, _, at, nbytes in unit.chunks)
        assert begin <= unit.start < unit.stop <= end
    assert sum(_wanted(unit) for unit in units) == sum(box.nbytes for box in boxes)


def _wanted(unit: ReadUnit) -> int:
    return sum(nbytes for *_, nbytes in unit.chunks)
