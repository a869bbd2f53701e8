"""Every point at which a process can end: counted, and tried one by one.

    points = CrashPoints(places, saving("save", 2))
    print(points.report())                     # save: 37 operations, 14 of them changes, 96 cases
    for case in points.cases():
        assert not points.run(case)

A scenario is run once to count its operations: its calls to storage and catalog. Then, for every operation and every
way in which it can go wrong (``Operation.ways``), it is run again from the same beginning: the process ends before,
in the middle of or after that call, or lives on with an answer that is lost. Afterwards new processes look at the place
through every door, recover, collect garbage and save (``crash_checks``). Any backend and any catalog can be given by
``Places``.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ckptfmt.engine.save.outcome import find_fenced
from ckptfmt.errors import CkptError
from ckptfmt.testing.crash_checks import Door, Examination
from ckptfmt.testing.crash_life import WAYS, Life, Operation, Place, Places, Strike, Way
from ckptfmt.testing.crash_scenarios import RUN, Scenario, Successor, Told

__all__ = ["Case", "CrashPoints", "Overtaken", "OvertakenCase"]


@dataclass(frozen=True)
class Case:
    k: int
    """Counts the operations of the scenario from 1."""
    operation: Operation
    way: Way

    def __str__(self) -> str:
        return f"k={self.k} {self.way} {self.operation}"


@dataclass
class CrashPoints:
    """The crash points of one scenario. ``close`` forgets the place from which every case starts."""

    places: Places
    scenario: Scenario
    command_line: bool = True
    doors: tuple[Door, ...] = ()
    meanwhile: Callable[[Place], None] = field(default=lambda place: None)
    """What happens to the place after the process ended, before anybody looks."""
    operations: list[Operation] = field(init=False)
    cases_run: int = 0
    reached: set[int] = field(default_factory=set)
    """Every k at which a case did what it was to do."""

    def __post_init__(self) -> None:
        self._place = self.places.empty()
        self._told = self.scenario.prepare(self._place)
        self._put_back = self.places.keep(self._place)
        self.operations = self._count()

    def close(self) -> None:
        self.places.forget(self._place)

    @property
    def changes(self) -> int:
        return sum(operation.changes for operation in self.operations)

    def report(self) -> str:
        counted = f"{len(self.operations)} operations, {self.changes} of them changes"
        cases = sum(len(operation.ways) for operation in self.operations)
        ran = f", {self.cases_run} run" if self.cases_run else ""
        return f"{self.scenario.name}: {counted}, {cases} cases{ran}"

    def cases(self, *, every: int = 1, ways: Sequence[Way] = WAYS) -> Iterator[Case]:
        """All cases of these ways, or every ``every``-th of them."""
        found = [
            Case(k, operation, way)
            for k, operation in enumerate(self.operations, start=1)
            for way in operation.ways
            if way in ways
        ]
        yield from found[::every]

    def run(self, case: Case) -> list[str]:
        """Let the scenario go wrong at one point and look at what is left: everything that is wrong, best nothing."""
        self.cases_run += 1
        strike = Strike(case.operation, case.way)
        told = self.begin()
        problems = self._work(told, strike)
        if not strike.reached:
            return [f"{case}: it was never reached"]
        self.reached.add(case.k)
        self.meanwhile(self.place)
        problems += self.examine(told)
        return [f"{case}: {problem}" for problem in problems]

    def kill(self, case: Case) -> list[str]:
        """The same with a real process, which is killed by SIGKILL. ``case.way`` is one that ends the process.

        For places that other processes see.
        """
        self.cases_run += 1
        told = self.begin()
        child = os.fork()
        if child == 0:
            try:
                strike = Strike(case.operation, case.way, end=lambda: os.kill(os.getpid(), signal.SIGKILL))
                self.scenario.work(Life(self.place, strike), self.begin_told())
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            return [f"{case}: it was never reached"]
        self.reached.add(case.k)
        return [f"{case} (killed): {problem}" for problem in self.examine(told)]

    def begin(self) -> Told:
        """Bring the place back to what the scenario begins with; returns what is known of it."""
        self._put_back()
        return self.begin_told()

    def begin_told(self) -> Told:
        told = self._told
        return Told(set(told.committed), set(told.by_catalog), set(told.failed), set(told.retired))

    def examine(self, told: Told) -> list[str]:
        return Examination(self.place, self.scenario, told, self.command_line, self.doors).run()

    @property
    def place(self) -> Place:
        return self._place

    def _work(self, told: Told, strike: Strike) -> list[str]:
        life = Life(self.place, strike, opened=self.scenario.opened)
        try:
            self.scenario.work(life, told)
        except CkptError as error:
            told.errors.append(error)
            if not life.dead.is_set() and not error.transient:
                return [f"{type(error).__name__}: {error}"]
        finally:
            life.end()
        return self._threads_left()

    def _count(self) -> list[Operation]:
        """What a life that goes well does. It has to be well itself."""
        told = self.begin()
        life = Life(self.place, opened=self.scenario.opened)
        try:
            self.scenario.work(life, told)
            operations = list(life.operations)
        finally:
            life.end()
        problems = self.examine(told)
        if problems:
            raise AssertionError(f"{self.scenario.name}, with nothing going wrong: {problems}")
        return operations

    @staticmethod
    def _threads_left() -> list[str]:
        """A process that is dead does nothing more: its threads have run into that."""
        until = time.monotonic() + 10.0
        for thread in threading.enumerate():
            if thread.name.startswith("ckptfmt-") and not thread.daemon:
                thread.join(max(0.0, until - time.monotonic()))
                if thread.is_alive():
                    return [f"the thread {thread.name} goes on"]
        return []


@dataclass(frozen=True)
class OvertakenCase:
    k: int
    operation: Operation

    def __str__(self) -> str:
        return f"k={self.k} overtaken before {self.operation}"


@dataclass
class Overtaken:
    """Two launches of one run at once: the older stands at an operation while a newer one takes over and saves.

    The older goes on afterwards. It commits nothing any more, and says that it was fenced.
    """

    points: CrashPoints

    def cases(self, *, every: int = 1) -> Iterator[OvertakenCase]:
        """Every operation from the first on that only the holder of the lease makes."""
        operations = list(enumerate(self.points.operations, start=1))
        first = next(k for k, operation in operations if operation.op == "acquire_launch") + 1
        yield from [OvertakenCase(k, operation) for k, operation in operations if k >= first][::every]

    def run(self, case: OvertakenCase) -> list[str]:
        points = self.points
        points.cases_run += 1
        told = points.begin()
        successor = Successor(points.place)
        strike = successor.strike(case.operation)
        life = Life(points.place, strike)
        try:
            points.scenario.work(life, told)
        except CkptError as error:
            told.errors.append(error)
        finally:
            life.end()
        if not strike.reached:
            return [f"{case}: it was never reached"]
        points.reached.add(case.k)
        problems = self._judge(told, successor)
        told.committed |= successor.told.committed
        problems += points.examine(told)
        return [f"{case}: {problem}" for problem in problems]

    def _judge(self, told: Told, successor: Successor) -> list[str]:
        if successor.error is not None:
            return [f"the newer launch: {type(successor.error).__name__}: {successor.error}"]
        problems = []
        with self.points.place.open("r") as repository:
            rows = repository.generations(run=RUN)
        if len(rows) != successor.commits:
            problems.append(f"the older launch committed after it was fenced: {rows[0]}")
        if rows[0].step != 10:
            problems.append(f"step {rows[0].step} is the latest, not what the newer launch saved")
        if successor.restored != rows[1].step:
            problems.append(
                f"the newer launch restored step {successor.restored}, but {rows[1].step} came before its own"
            )
        if told.failed and not any(find_fenced(error) for error in told.errors):
            problems.append(f"the older launch never said that it was fenced: {told.errors}")
        return problems
