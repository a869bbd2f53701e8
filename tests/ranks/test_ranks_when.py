"""When to save is one decision for all ranks, also where only one of them has a reason."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
from meeting_rig import WORLD, Job, Rank, rows_of, wait_until

import ckptfmt
from ckptfmt.engine.save import council as councils
from ckptfmt.engine.save import meeting
from ckptfmt.engine.save.context import Ranks
from ckptfmt.engine.save.council import Council, Why
from ckptfmt.errors import CatalogError

Start = Callable[..., Job]

PAUSE: Final = 0.01


class Table:
    """A board in memory: one for all ranks of a test, which are threads."""

    pause = PAUSE

    def __init__(self) -> None:
        self.messages: dict[tuple[str, int], Mapping[str, Any]] = {}
        self.broken = False
        self.refused: Callable[[str, str], bool] = lambda verb, topic: False
        self.asked: Callable[[str], None] = lambda topic: None
        self._lock = threading.Lock()

    def _check(self, verb: str, topic: str) -> None:
        if self.broken or self.refused(verb, topic):
            raise CatalogError("the board is away", transient=True)

    def post(self, topic: str, slot: int, body: Mapping[str, Any]) -> Mapping[str, Any]:
        self._check("post", topic)
        with self._lock:
            return self.messages.setdefault((topic, slot), body)

    def peek(self, topic: str, slots: Sequence[int]) -> dict[int, Mapping[str, Any]]:
        self._check("peek", topic)
        self.asked(topic)
        with self._lock:
            return {slot: self.messages[topic, slot] for slot in slots if (topic, slot) in self.messages}

    def complete(self, topic: str, slots: Sequence[int]) -> dict[int, Mapping[str, Any]] | None:
        found = self.peek(topic, slots)
        return found if len(found) == len(slots) else None

    def forget(self, topic: str, slots: Sequence[int]) -> None:
        with self._lock:
            for slot in slots:
                self.messages.pop((topic, slot), None)


class Seats:
    """A council of ranks that share a table; ``wishes[rank]`` is why that rank would have a save."""

    def __init__(self, world: int = WORLD, **seconds: float) -> None:
        self.table = Table()
        self.wishes: dict[int, Why | None] = dict.fromkeys(range(world))
        self.told: dict[int, list[tuple[int, Why]]] = {rank: [] for rank in range(world)}
        self.longest: dict[int, float] = dict.fromkeys(range(world), 0.0)
        members = tuple(range(world))
        self.seats = [
            Council(
                self.table,
                Ranks(rank, world, members),
                lambda rank=rank: self.wishes[rank],  # type: ignore[misc]
                partial(self.told_of, rank),
                **seconds,
            )
            for rank in members
        ]

    def told_of(self, rank: int, why: Why) -> None:
        self.wishes[rank] = None if self.wishes[rank] == why else self.wishes[rank]

    def train(self, rank: int, steps: int, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        for step in range(steps):
            time.sleep(seconds)
            began = time.monotonic()
            why = self.seats[rank].ask(step)
            self.longest[rank] = max(self.longest[rank], time.monotonic() - began)
            if why is not None:
                self.told[rank].append((step, why))
            if until():
                return

    def close(self) -> None:
        for seat in self.seats:
            seat.close()


@pytest.fixture
def seats() -> Iterator[Callable[..., Seats]]:
    with ExitStack() as stack:

        def make(**options: Any) -> Seats:
            made = Seats(**options)
            stack.callback(made.close)
            return made

        yield make


def all_train(
    table: Seats,
    steps: int,
    paces: Sequence[float],
    ranks: Sequence[int] | None = None,
    until: Callable[[int], bool] = lambda rank: False,
) -> None:
    threads = [
        threading.Thread(target=table.train, args=(rank, steps, paces[rank], partial(until, rank)))
        for rank in (range(len(paces)) if ranks is None else ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank hangs"


@pytest.mark.parametrize("signalled", range(WORLD))
def test_one_rank_with_a_reason_is_enough(seats: Callable[..., Seats], signalled: int) -> None:
    table = seats()
    table.wishes[signalled] = "preempted"
    all_train(table, 150, [0.003] * WORLD)
    assert table.told == dict.fromkeys(range(WORLD), table.told[0])
    assert [why for _, why in table.told[0]] == ["preempted"]


@pytest.mark.parametrize(
    "paces",
    [
        (0.001, 0.002, 0.004, 0.008),
        pytest.param((0.003, 0.001, 0.001, 0.001), marks=pytest.mark.slow),
        pytest.param((0.0002, 0.01, 0.0002, 0.01), marks=pytest.mark.slow),
    ],
)
def test_ranks_at_different_speeds_save_at_one_step(seats: Callable[..., Seats], paces: Sequence[float]) -> None:
    """Nothing holds them together: the proposal runs after the fastest until it is ahead of it."""
    table = seats()
    table.wishes[2] = "preempted"
    table.wishes[0] = "seconds"
    end = time.monotonic() + 40
    all_train(table, 10**7, paces, until=lambda rank: len(table.told[rank]) == 2 or time.monotonic() > end)
    assert table.told == dict.fromkeys(range(WORLD), table.told[0])
    assert {why for _, why in table.told[0]} == {"seconds", "preempted"}


def test_seconds_pass_on_the_coordinators_clock_alone(seats: Callable[..., Seats]) -> None:
    table = seats()
    table.wishes[1] = "seconds"  # its clock is hours ahead
    all_train(table, 60, [0.003] * WORLD)
    assert table.told == {rank: [] for rank in range(WORLD)}
    table.wishes[0] = "seconds"
    end = time.monotonic() + 40
    all_train(table, 10**7, [0.003] * WORLD, until=lambda rank: table.told[rank] != [] or time.monotonic() > end)
    assert table.told == dict.fromkeys(range(WORLD), table.told[0])
    assert [why for _, why in table.told[0]] == ["seconds"]


@pytest.mark.slow
def test_nobody_hangs_when_a_rank_has_died(seats: Callable[..., Seats]) -> None:
    table = seats(acknowledge_seconds=0.3, outcome_seconds=0.6)
    table.seats[3]._beat.stop()  # what is left of a dead rank: silence
    table.wishes[1] = "preempted"
    all_train(table, 150, [0.003] * 3, ranks=[0, 1, 2])
    assert all(table.told[rank] == [] for rank in range(WORLD))
    assert max(table.longest.values()) < 3


def test_nobody_hangs_when_the_coordinator_has_died(seats: Callable[..., Seats]) -> None:
    """It dies between the acknowledgements and the outcome: the others call the proposal off, all of them."""
    table = seats(acknowledge_seconds=30, outcome_seconds=0.4)
    table.table.post("save-when/0/step", 0, {"step": 20, "why": "seconds"})
    table.seats[0]._beat.stop()
    all_train(table, 60, [0.005] * WORLD, ranks=[1, 2, 3])
    assert all(table.told[rank] == [] for rank in range(WORLD))
    assert table.table.messages["save-when/0/outcome", 0]["confirmed"] is False
    assert max(table.longest.values()) < 3


def test_a_confirmation_that_came_first_binds_whoever_wanted_to_call_off(seats: Callable[..., Seats]) -> None:
    """A rank that waited in vain asks the board, not itself."""
    table = seats(acknowledge_seconds=30, outcome_seconds=0.2)
    for seat in table.seats:
        seat._beat.stop()
    proposal = councils.Proposal(0, 5, "seconds")
    for seat in table.seats[1:]:
        seat._open = proposal
    table.table.post(proposal.topic("outcome"), 0, {"confirmed": True})
    all_train(table, 8, [0.0] * WORLD, ranks=[1, 2, 3])
    assert {rank: table.told[rank] for rank in (1, 2, 3)} == {rank: [(5, "seconds")] for rank in (1, 2, 3)}


def test_a_board_that_is_away_for_a_while_delays_and_loses_nothing(seats: Callable[..., Seats]) -> None:
    table = seats()
    table.table.broken = True
    table.wishes[1] = "preempted"
    all_train(table, 30, [0.002] * WORLD)
    assert all(table.told[rank] == [] for rank in range(WORLD))
    table.table.broken = False
    all_train(table, 200, [0.003] * WORLD)
    assert table.told == dict.fromkeys(range(WORLD), table.told[0])
    assert len(table.told[0]) == 1


def test_a_proposal_that_was_never_posted_is_called_off_and_the_next_one_counts(seats: Callable[..., Seats]) -> None:
    """The board takes the coordinator's outcome but not, before it, the step: the others wait at that number."""
    table = seats(outcome_seconds=0.2)
    table.table.refused = lambda verb, topic: verb == "post" and topic == "save-when/0/step"
    table.seats[0].ask(0)
    table.wishes[0] = "preempted"
    wait_until(lambda: table.seats[0]._open is not None)
    open_ = table.seats[0]._open
    assert open_ is not None
    with pytest.raises(CatalogError):  # it may not go on as if all knew
        table.seats[0].ask(open_.step)
    assert table.table.messages == {}
    table.table.refused = lambda verb, topic: False
    all_train(table, 10**6, [0.003] * WORLD, until=lambda rank: bool(table.told[rank]))
    assert table.told == dict.fromkeys(range(WORLD), table.told[0])


def test_a_reason_that_the_last_save_has_satisfied_makes_no_second_one(seats: Callable[..., Seats]) -> None:
    """The coordinator reaches the agreed step while its other thread, which has looked for wishes, would propose."""
    table = seats(world=2)
    for seat in table.seats:
        seat._beat.stop()
    coordinator, other = table.seats
    coordinator.ask(0)
    other.ask(0)
    table.wishes[0] = "seconds"
    while not coordinator._due:
        coordinator._look()
        other._look()
    step = coordinator._due[0].step
    reached: list[Why | None] = []

    def meanwhile(topic: str) -> None:
        if topic == councils._WISH and not reached:
            reached.append(coordinator.ask(step))

    table.table.asked = meanwhile
    coordinator._look()
    table.table.asked = lambda topic: None
    assert (reached or [coordinator.ask(step)]) == ["seconds"]
    for _ in range(5):
        coordinator._look()
        other._look()
    assert coordinator._open is None
    assert coordinator._due == []


def test_proposals_leave_no_messages_behind(seats: Callable[..., Seats]) -> None:
    """Also those that were called off unanswered."""
    table = seats(world=2)
    for seat in table.seats:
        seat._beat.stop()
    coordinator, other = table.seats
    for step in range(10**6, 20 * 10**6, 10**6):  # further apart than any lead
        table.wishes[0] = "seconds"
        coordinator.ask(step)
        other.ask(step)
        coordinator._look()
        if step % (3 * 10**6) == 0 and coordinator._open is not None:
            coordinator._call_off(coordinator._open)
        for _ in range(3):
            other._look()
            coordinator._look()
        other._look()
    assert coordinator._number > 10
    assert len(table.table.messages) <= 6


# -- with processes ---------------------------------------------------------------------------------------
@pytest.mark.slow
def test_one_signalled_rank_of_four_ends_all_at_one_step(start: Start, root: Path) -> None:
    """In mid-step: no rank ends before the others, and none saves another step."""

    def body(rank: Rank) -> Any:
        saved: list[int] = []
        with rank.checkpointer(preempt_signals=[signal.SIGUSR1]) as checkpointer:
            for step in range(4000):
                if step == 10 and rank.rank == 2:
                    os.kill(os.getpid(), signal.SIGUSR1)
                    assert not checkpointer.preempted
                time.sleep(0.005)
                if checkpointer.should_save(step):
                    checkpointer.save(rank.state(step), step=step)
                    saved.append(step)
                if checkpointer.preempted:
                    break
            return saved, step

    results = start().run(body)
    assert results == [results[0]] * WORLD
    saved, last = results[0]
    assert saved == [last]
    assert [(row["step"], row["state"]) for row in rows_of(root)] == [(last, "committed")]


@pytest.mark.slow
def test_every_seconds_with_clocks_that_differ(start: Start, root: Path) -> None:
    """Each rank counts from another moment and at another speed: only the coordinator's clock decides."""

    def body(rank: Rank) -> Any:
        real, speed = time.monotonic, (1.0, 3.0, 0.3, 7.0)[rank.rank]
        ckptfmt.policy.time = Clock(lambda: 5000.0 * rank.rank + speed * real())  # type: ignore[attr-defined]
        saved = []
        with rank.checkpointer(every_seconds=0.4) as checkpointer:
            for step in range(20_000):
                if len(saved) == 2:
                    break
                time.sleep(0.004)
                if checkpointer.should_save(step):
                    pending = checkpointer.save(rank.state(step), step=step)
                    assert pending is not None
                    saved.append((step, pending.result(30).id))
            return saved

    results = start().run(body)
    assert results == [results[0]] * WORLD
    assert len(results[0]) == 2
    assert [row["step"] for row in rows_of(root)] == [step for step, _ in results[0]]


class Clock:
    """Stands in for the module ``time`` of one room."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self.monotonic = monotonic


@pytest.mark.slow
def test_a_rank_that_dies_keeps_nobody_waiting(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "LEAVE_SECONDS", 0.2)
    monkeypatch.setattr(
        councils.Council.__init__, "__kwdefaults__", {"acknowledge_seconds": 0.5, "outcome_seconds": 2.0}
    )

    def body(rank: Rank) -> Any:
        longest = 0.0
        with rank.checkpointer(preempt_signals=[signal.SIGUSR1], every_steps=100) as checkpointer:
            for step in range(1, 99):
                if rank.rank == 3 and step == 20:
                    rank.die()
                if rank.rank == 1 and step == 30:
                    os.kill(os.getpid(), signal.SIGUSR1)
                time.sleep(0.02)
                began = time.monotonic()
                assert not checkpointer.should_save(step)
                longest = max(longest, time.monotonic() - began)
            return longest

    results = start().run_some(body)
    assert results[3] is None
    assert max(results[:3]) < 5


def test_steps_are_a_pure_function_and_ask_nobody(start: Start, root: Path) -> None:
    def body(rank: Rank) -> Any:
        with rank.checkpointer(every_steps=5) as checkpointer:
            checkpointer.restore(rank.state(0))
            rank.catalog.counts.clear()
            asked = [step for step in range(1, 21) if checkpointer.should_save(step)]
            return asked, sum(rank.catalog.counts.values()), threading.active_count()

    for asked, calls, _ in start().run(body):
        assert asked == [5, 10, 15, 20]
        assert calls == 0
