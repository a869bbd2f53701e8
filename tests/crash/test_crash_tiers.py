"""A process ends at every operation of a save that goes through a stage and onto replicas.

What had been staged whole is finished by whoever recovers on that host; what the stage took with it is aborted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from crash_places import MemoryPlaces, lose_stage
from forked import at_once

from ckptfmt.engine import packs, replicate, units
from ckptfmt.format import checksum, layout
from ckptfmt.testing.crash_life import Life, Operation, Place
from ckptfmt.testing.crash_points import Case, CrashPoints, Overtaken
from ckptfmt.testing.crash_scenarios import (
    GC,
    NEXT_STEP,
    RECOVER,
    RUN,
    TAKEOVER,
    Scenario,
    Told,
    commit,
    leave,
    sample_state,
    saving,
)

Tell = Callable[[str], None]
UNIT = 1 << 16


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is 8 MiB elsewhere is 64 KiB, and nobody waits before another attempt."""
    monkeypatch.setattr(units, "IO_BYTES", UNIT)
    monkeypatch.setattr(packs, "IO_BYTES", UNIT)
    monkeypatch.setattr(checksum, "CHUNK_BYTES", UNIT)
    monkeypatch.setattr(replicate, "_PAUSE_SECONDS", 0.0)


def _prepare_resume(place: Place) -> Told:
    told = commit(place, Told(), sample_state(1), 1)
    leave(place, 2, "open_writer", ".safetensors", durable_only=True)
    return told


def _resume(life: Life, told: Told) -> None:
    told.hear_recovered(life.repository.recover())


RESUME = Scenario("resume", _prepare_resume, _resume)


@dataclass(frozen=True)
class Count:
    scenario: Scenario
    operations: int
    changes: int
    every: int
    """The default suite runs every n-th case, the long one all."""
    replicas: int = 0
    durable_on: int = 1


COUNTS = {
    "save": Count(saving("save through a stage", 2), 45, 26, 17),
    "replica": Count(saving("save through a stage, with a replica", 2), 64, 37, 29, replicas=1),
    "durable on two": Count(saving("save through a stage, durable on two", 2), 64, 37, 37, replicas=1, durable_on=2),
    "two in flight": Count(saving("save through a stage, two in flight", 2, 3, in_flight_max=2), 80, 48, 59),
    "resume": Count(RESUME, 43, 18, 11, replicas=1, durable_on=2),
    "recover": Count(replace(RECOVER, name="recover, with a stage"), 53, 17, 37),
    "takeover": Count(replace(TAKEOVER, name="takeover, with a stage"), 78, 39, 47),
    "gc": Count(replace(GC, name="gc, with a replica"), 90, 30, 47, replicas=1),
}


def _points(memory_places: MemoryPlaces, count: Count, **named: Any) -> CrashPoints:
    places = memory_places.tiered(replicas=count.replicas, durable_on=count.durable_on)
    return CrashPoints(places, count.scenario, **named)


@pytest.fixture
def points(memory_places: MemoryPlaces, request: pytest.FixtureRequest, tell: Tell) -> Iterator[CrashPoints]:
    count = COUNTS[request.param]
    made = _points(memory_places, count)
    assert len(made.operations) >= count.operations, made.report()
    assert made.changes >= count.changes, made.report()
    yield made
    tell(made.report())
    made.close()


def _cases(points: CrashPoints) -> list[Case]:
    return [
        case for case in points.cases() if case.way != "refused" and (case.operation.changes or case.way != "before")
    ]


@pytest.mark.parametrize(("points", "name"), [(name, name) for name in COUNTS], indirect=["points"], ids=list(COUNTS))
def test_whatever_ends_a_process_harms_nothing(points: CrashPoints, name: str) -> None:
    cases = _cases(points)[:: COUNTS[name].every]
    for case in cases:
        assert points.run(case) == []
    assert points.reached == {case.k for case in cases}


@pytest.mark.long
@pytest.mark.parametrize("name", COUNTS)
def test_every_crash_point(tmp_path: Path, empty_catalog: Path, quick: None, name: str, tell: Tell) -> None:
    """Two processes share the work."""

    def part(number: int) -> dict[str, Any]:
        own = tmp_path / str(number)
        own.mkdir()
        points = _points(MemoryPlaces(own, empty_catalog), COUNTS[name])
        cases = sorted(_cases(points), key=lambda case: (case.operation, case.way))
        problems = [problem for case in cases[number::2] for problem in points.run(case)]
        return {"problems": problems, "run": points.cases_run, "report": points.report().rpartition(",")[0]}

    told = at_once(part, 2)
    assert [problem for one in told for problem in one["problems"]] == []
    tell(f"{told[0]['report']}, {sum(one['run'] for one in told)} run")


def _k_of(points: CrashPoints, op: str, suffix: str, party: str = "stage") -> int:
    return next(
        k
        for k, operation in enumerate(points.operations, start=1)
        if (operation.party, operation.op) == (party, op) and operation.key.endswith(suffix)
    )


def _is_committed(points: CrashPoints, step: int) -> bool:
    with points.place.open("r") as repository:
        return step in {info.step for info in repository.generations(run=RUN)}


@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("points", ["save"], indirect=True)
def test_what_was_staged_whole_is_not_lost(points: CrashPoints, every: int) -> None:
    """From the staged part on a killed process has saved, if only its host lives."""
    whole = _k_of(points, "create", layout.staged_part_name(0))
    seen = {True: 0, False: 0}
    for case in [case for case in _cases(points) if case.way in ("before", "torn", "after")][::every]:
        staged = case.k > whole or (case.k == whole and case.way == "after")
        assert points.run(case) == []
        assert _is_committed(points, 2) is staged, case
        assert _is_committed(points, NEXT_STEP)
        seen[staged] += 1
    assert all(seen.values())


@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.long)])
def test_a_host_that_is_lost_takes_its_stage_with_it(memory_places: MemoryPlaces, every: int) -> None:
    points = _points(memory_places, COUNTS["save"], meanwhile=lose_stage)
    durable = _k_of(points, "create", layout.part_name(0), "storage")
    for case in [case for case in _cases(points) if case.way in ("before", "torn", "after")][::every]:
        assert points.run(case) == []
        if case.k < durable:
            assert not _is_committed(points, 2), case
    points.close()


@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("points", ["save"], indirect=True)
def test_a_launch_overtaken_at_any_operation_commits_nothing_more(points: CrashPoints, every: int) -> None:
    overtaken = Overtaken(points)
    for case in overtaken.cases(every=every):
        assert overtaken.run(case) == []


def test_operations_of_tiers_are_told_apart() -> None:
    assert str(Operation("stage", "create", "a/r00000.staged.json", -1, 1)) == "stage create r00000.staged.json"
