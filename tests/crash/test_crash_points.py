"""A process ends at every one of its operations, in every way; what it leaves is whole, and the next goes on.

The numbers are what was counted: if one falls, either the work has become less or the enumerator has gone blind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crash_places import FolderPlaces, MemoryPlaces, PostgresPlaces, lose_catalog
from forked import at_once

from ckptfmt.catalog.reader import ReadOnlyCatalog
from ckptfmt.catalog.sql import SqlCatalog
from ckptfmt.engine import plan as plans
from ckptfmt.engine import units
from ckptfmt.engine.keep import recover
from ckptfmt.format import checksum
from ckptfmt.pending import PendingSave
from ckptfmt.testing.catalog_faults import CATALOG_CHANGES
from ckptfmt.testing.crash_life import Operation, Way
from ckptfmt.testing.crash_points import Case, CrashPoints, Overtaken
from ckptfmt.testing.crash_rebuild import rebuild_door, rebuilding
from ckptfmt.testing.crash_scenarios import ABORT, GC, RECOVER, TAKEOVER, Scenario, sample_state, saving

Tell = Callable[[str], None]
UNIT = 1 << 16
STAGED = 8 * UNIT


@dataclass(frozen=True)
class Count:
    scenario: Callable[[], Scenario]
    operations: int
    changes: int
    every: int
    """The default suite runs every n-th case, the long one all."""
    whole: bool = False
    """Every way at every operation."""
    snapshot_only: bool = False
    """What differs from the first scenario is what happens up to the part."""


def _torch_scenario() -> Scenario:
    """Deferred: the optimizer's step waits for the copies, and changes everything after ``save`` has returned."""
    torch = pytest.importorskip("torch")

    def state(step: int) -> dict[str, Any]:
        weight = torch.nn.Parameter(torch.full((400, 50), float(step)))
        optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.5)
        weight.grad = torch.zeros_like(weight)
        optimizer.step()  # zero momentum, but a buffer of its own
        return {"weight": weight, "optimizer": optimizer}

    def differences(found: Any, step: int) -> str | None:
        weight = np.asarray(found["weight"])
        return None if weight.shape == (400, 50) and (weight == step).all() else f"weight is not {step}"

    def update(live: Any, pending: PendingSave) -> None:
        live["weight"].grad.fill_(1000.0)
        live["optimizer"].step()

    return saving("save, deferred", 2, state=state, differences=differences, change=update, freeze="deferred")


def _large(step: int) -> dict[str, Any]:
    return sample_state(step, 150_000)


COUNTS = {
    "save": Count(lambda: saving("save", 2), 31, 18, 12, whole=True),
    "two in flight": Count(lambda: saving("save, two in flight", 2, 3, in_flight_max=2), 54, 32, 40),
    "sync": Count(lambda: saving("save, part of it synchronous", 2, sync=["w"]), 35, 21, 13, snapshot_only=True),
    "staged": Count(
        lambda: saving("save, staged", 2, state=_large, host_bytes_max=STAGED), 49, 36, 47, snapshot_only=True
    ),
    "deferred": Count(_torch_scenario, 33, 20, 10, snapshot_only=True),
    "abort": Count(lambda: ABORT, 49, 28, 31),
    "gc": Count(lambda: GC, 53, 17, 31),
    "recover": Count(lambda: RECOVER, 46, 16, 25),
    "takeover": Count(lambda: TAKEOVER, 60, 29, 41),
    "rebuild": Count(lambda: rebuilding(lose_catalog), 25, 3, 9),
}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is 8 MiB elsewhere is 64 KiB, so that a small state is written in several pieces."""
    monkeypatch.setattr(units, "IO_BYTES", UNIT)
    monkeypatch.setattr(checksum, "CHUNK_BYTES", UNIT)
    monkeypatch.setattr(plans, "WINDOW_BYTES", STAGED)
    monkeypatch.setattr(plans, "HOST_BYTES_MIN", STAGED)


@pytest.fixture
def points(memory_places: MemoryPlaces, request: pytest.FixtureRequest, tell: Tell) -> Iterator[CrashPoints]:
    count = COUNTS[request.param]
    made = CrashPoints(memory_places, count.scenario(), doors=(rebuild_door(lose_catalog),))
    assert len(made.operations) >= count.operations, made.report()
    assert made.changes >= count.changes, made.report()
    yield made
    tell(made.report())
    made.close()


def _until_the_part(operations: list[Operation]) -> range:
    """The k of the operations from C1 to the part."""
    names = [(operation.op, operation.key.rpartition("/")[2]) for operation in operations]
    begin = next(k for k, (op, _) in enumerate(names, start=1) if op == "begin_save")
    end = next(k for k, (_, key) in enumerate(names, start=1) if key.endswith(".part.json"))
    return range(begin, end + 1)


def _wanted(points: CrashPoints, count: Count) -> range:
    return _until_the_part(points.operations) if count.snapshot_only else range(1, len(points.operations) + 1)


def _cases(points: CrashPoints, count: Count) -> list[Case]:
    """All of them for a plain save. Elsewhere a process that ends at a call that changes nothing leaves what it left
    after the change before, and one that was refused what it had before."""
    wanted = _wanted(points, count)
    cases = [case for case in points.cases() if case.k in wanted]
    if count.whole:
        return cases
    return [case for case in cases if case.way != "refused" and (case.operation.changes or case.way != "before")]


@pytest.mark.parametrize(("points", "name"), [(name, name) for name in COUNTS], indirect=["points"], ids=list(COUNTS))
def test_whatever_ends_a_process_harms_nothing(points: CrashPoints, name: str) -> None:
    cases = _cases(points, COUNTS[name])[:: COUNTS[name].every]
    for case in cases:
        assert points.run(case) == []
    assert points.reached == {case.k for case in cases}


@pytest.mark.long
@pytest.mark.parametrize("name", COUNTS)
def test_every_crash_point(tmp_path: Path, empty_catalog: Path, quick: None, name: str, tell: Tell) -> None:
    """Two processes share the work."""
    told = at_once(lambda part: _part(tmp_path, empty_catalog, COUNTS[name], part), 2)
    assert [problem for one in told for problem in one["problems"]] == []
    assert {name for one in told for name in one["reached"]} == set(told[0]["wanted"]) == set(told[1]["wanted"])
    tell(f"{told[0]['report']}, {sum(one['run'] for one in told)} run")


def _part(folder: Path, empty_catalog: Path, count: Count, part: int) -> dict[str, Any]:
    own = folder / str(part)
    own.mkdir()
    points = CrashPoints(MemoryPlaces(own, empty_catalog), count.scenario(), doors=(rebuild_door(lose_catalog),))
    cases = sorted(_cases(points, count), key=lambda case: (case.operation, case.way))  # they may come in another order
    problems = [problem for case in cases[part::2] for problem in points.run(case)]
    return {
        "problems": problems,
        "reached": [repr(points.operations[k - 1]) for k in points.reached],
        "wanted": [repr(points.operations[k - 1]) for k in _wanted(points, count)],
        "run": points.cases_run,
        "report": points.report().rpartition(",")[0],
    }


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("points", ["save"], indirect=True)
def test_a_launch_overtaken_at_any_operation_commits_nothing_more(points: CrashPoints, every: int) -> None:
    overtaken = Overtaken(points)
    for case in overtaken.cases(every=every):
        assert overtaken.run(case) == []


ENDINGS: tuple[Way, ...] = ("before", "torn", "after")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("every", [25, pytest.param(3, marks=pytest.mark.slow)])
def test_a_killed_process_on_a_disk(folder_places: FolderPlaces, every: int, tell: Tell) -> None:
    points = CrashPoints(folder_places, saving("save, on a disk, killed", 2))
    for case in points.cases(every=every, ways=ENDINGS):
        assert points.kill(case) == []
    tell(points.report())
    points.close()


@pytest.mark.parametrize("every", [49, pytest.param(7, marks=pytest.mark.slow)])
def test_the_same_on_a_disk(folder_places: FolderPlaces, every: int, tell: Tell) -> None:
    points = CrashPoints(folder_places, saving("save, on a disk", 2))
    for case in points.cases(every=every):
        assert points.run(case) == []
    tell(points.report())
    points.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.slow
def test_a_killed_process_with_a_catalog_on_a_server(postgres_places: PostgresPlaces, tell: Tell) -> None:
    points = CrashPoints(postgres_places, saving("save, with PostgreSQL, killed", 2))
    for case in points.cases(every=9, ways=ENDINGS):
        assert points.kill(case) == []
    tell(points.report())
    points.close()


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(
            each, id=each.name, marks=pytest.mark.slow if each.name in ("save", "recover") else pytest.mark.long
        )
        for each in (saving("save", 2), ABORT, GC, RECOVER, TAKEOVER)
    ],
)
def test_the_same_on_a_server(postgres_places: PostgresPlaces, scenario: Scenario, tell: Tell) -> None:
    points = CrashPoints(postgres_places, replace(scenario, name=f"{scenario.name}, with PostgreSQL"))
    for case in points.cases(every=29):
        assert points.run(case) == []
    tell(points.report())
    points.close()


# -- the enumerator itself --------------------------------------------------------------------------
@pytest.mark.parametrize("points", ["save"], indirect=True)
def test_an_operation_that_does_not_come_is_told(points: CrashPoints) -> None:
    case = next(points.cases())
    absent = type(case)(99, Operation("storage", "create", "nowhere", -1, 1), "before")
    (problem,) = points.run(absent)
    assert "never reached" in problem
    assert 99 not in points.reached


@pytest.mark.parametrize(
    ("points", "forgotten", "op", "way", "problem"),
    [
        ("save", "prove_committed", "set_proven", "before", "without a proof"),
        ("save", "settle_older", "report_rank", "before", "recover left"),
        ("gc", "close_retired_late", "retire", "after", "storage proves"),
    ],
    indirect=["points"],
)
def test_what_recover_forgets_is_noticed(
    points: CrashPoints, monkeypatch: pytest.MonkeyPatch, forgotten: str, op: str, way: Way, problem: str
) -> None:
    case = next(case for case in points.cases() if (case.operation.op, case.way) == (op, way))
    assert points.run(case) == []
    monkeypatch.setattr(recover, forgotten, lambda *args, **named: [])
    assert any(problem in found for found in points.run(case))


def test_the_changes_are_what_a_reader_of_the_catalog_lacks() -> None:
    methods = {name for name in vars(SqlCatalog) if not name.startswith("_")} - {"read_only"}
    assert methods == CATALOG_CHANGES
    assert all(hasattr(ReadOnlyCatalog, name) for name in CATALOG_CHANGES)
