"""Limits: of bytes, refused before anything is written; of bandwidth; and threads that give way."""

from __future__ import annotations

import os
import threading
import time

import pytest
from tiers_rig import TieredPlace, assert_state, state_of

from ckptfmt.engine import priority
from ckptfmt.engine.limiter import Limiter
from ckptfmt.engine.transfer import run_apart
from ckptfmt.errors import CkptError, InvalidInput, OutOfSpace, SaveFailed
from ckptfmt.format import layout
from ckptfmt.format.states import State

NBYTES = 28_164
"""Of the pack of one generation."""


@pytest.mark.parametrize("whose", ["repository", "run"])
def test_a_save_that_passes_the_limit_is_refused_before_it_writes(place: TieredPlace, whose: str) -> None:
    limit = 2 * NBYTES + 1000
    process = place.open(bytes_max=limit if whose == "repository" else None)
    with process.checkpointer(bytes_max=limit if whose == "run" else None) as checkpointer:
        for seed in (1, 2):
            checkpointer.save(state_of(seed), step=seed).result(10)  # type: ignore[union-attr]
        written = process.backend.counts["open_writer"], process.stage.counts["open_writer"]
        for _ in range(2):  # a refusal takes nothing itself
            pending = checkpointer.save(state_of(3), step=3)
            assert pending is not None
            error = pending.exception(10)
            assert isinstance(error, SaveFailed)
            cause = error.__cause__
            assert isinstance(cause, OutOfSpace)
            assert cause.kind == "quota"
            assert cause.needed is not None
            assert cause.free is not None
            assert f"may hold {limit} bytes" in str(error)
            assert cause.free < cause.needed
        assert (process.backend.counts["open_writer"], process.stage.counts["open_writer"]) == written
        assert error.stage == "begin"
        row = process.rows()[-1]
        assert place.names(place.url, row.key) <= {layout.COMMIT}
    assert [row.state for row in process.rows()[:2]] == [State.COMMITTED] * 2


def test_a_run_is_not_held_to_account_for_others(place: TieredPlace) -> None:
    process = place.open()
    with process.checkpointer("other") as checkpointer:
        checkpointer.save(state_of(1), step=1).result(10)  # type: ignore[union-attr]
    with process.checkpointer(bytes_max=NBYTES + 1000) as checkpointer:
        assert_state(checkpointer.save(state_of(1), step=1).result(10).load(), 1)  # type: ignore[union-attr]


@pytest.mark.parametrize("threads", [1, 4])
def test_a_limiter_lets_no_more_pass(threads: int) -> None:
    limiter = Limiter(1_000_000)
    began = time.monotonic()

    def take() -> None:
        for _ in range(12 // threads):
            limiter.take(50_000)

    workers = [threading.Thread(target=take) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(20)
    assert 0.55 <= time.monotonic() - began < 5


def test_time_that_was_not_used_is_not_made_up_for() -> None:
    limiter = Limiter(1_000_000)
    limiter.take(1)
    time.sleep(0.3)
    began = time.monotonic()
    limiter.take(200_000)
    limiter.take(1)
    assert time.monotonic() - began >= 0.19


def test_whoever_waits_for_a_limiter_can_be_stopped() -> None:
    limiter = Limiter(10)
    limiter.take(1000)

    def give_up() -> None:
        raise CkptError("no longer")

    with pytest.raises(CkptError, match="no longer"):
        limiter.take(1, give_up)


@pytest.mark.parametrize("bad", [0, -1, 1.5, True])
def test_a_limit_has_to_be_one(bad: object) -> None:
    with pytest.raises(InvalidInput, match="bandwidth_max"):
        Limiter(bad)  # type: ignore[arg-type]


def test_copies_keep_to_the_limit(place: TieredPlace) -> None:
    """What goes to the stage is not limited, what leaves it is."""
    process = place.open(bandwidth_max=100_000)
    state = state_of(1, 12_000)
    first_began = time.monotonic()
    with process.checkpointer() as checkpointer:
        for seed in (1, 2):
            began = time.monotonic()
            pending = checkpointer.save(state, step=seed)
            assert pending is not None
            pending.wait("staged", timeout=10)
            staged = time.monotonic() - began
            pending.result(20)
        assert staged < 0.8
        assert time.monotonic() - first_began > 0.9, "the second copy waits for the first one's bytes"


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="Linux only")
def test_threads_that_copy_give_way_and_no_other_does() -> None:
    seen: list[int] = []

    def look() -> None:
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    run_apart([look] * 4, threads=2, name="t", begin=priority.give_way)
    assert set(seen) == {max(before, priority.NICENESS)}
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


def test_an_error_on_threads_apart_is_the_callers() -> None:
    def broken() -> None:
        raise CkptError("broken")

    with pytest.raises(CkptError, match="broken"):
        run_apart([broken] * 3, threads=2, name="t", begin=lambda: None)
