"""A call counts on every rank alike, also where it is refused, and what it has left for the others goes again."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from meeting_rig import WORLD, Job, Rank, assert_saved, save_and_wait, state_of, wait_until

import ckptfmt
from ckptfmt.engine.save import meeting
from ckptfmt.engine.save.context import SaveOrder
from ckptfmt.engine.save.outcome import tell
from ckptfmt.errors import CkptError, Corrupt, SaveFailed
from ckptfmt.format import layout
from ckptfmt.ports.coordination import Failure, PartReport
from ckptfmt.testing.catalog_faults import unreachable
from ckptfmt.testing.faults import Fault

Start = Callable[..., Job]
SOON = 15.0
"""Seconds: long before any deadline of these tests."""


# -- refused on one rank ------------------------------------------------------------------------------
def test_a_save_that_one_rank_refuses_fails_soon_and_counts_there_too(start: Start, root: Path) -> None:
    def body(rank: Rank) -> Any:
        with rank.checkpointer(commit_timeout=60) as checkpointer:
            first = None
            if rank.rank == 2:
                with pytest.raises(ckptfmt.InvalidInput, match="step"):
                    checkpointer.save(rank.state(1), step=-1)
            else:
                first = save_and_wait(checkpointer, rank.state(1), 1)
            return first, save_and_wait(checkpointer, rank.state(2), 2)

    results = start().run(body)
    for rank, (first, second) in enumerate(results):
        if rank != 2:
            assert (first["id"], first["rank"]) == (None, 2), first
            assert "InvalidInput" in first["text"]
            assert first["seconds"] < SOON
        assert second["id"] is not None, second
    assert len({second["id"] for _, second in results}) == 1
    assert_saved(root, 2, WORLD)


@pytest.mark.parametrize(
    ("victim", "fallback"), [(0, False), (2, False), pytest.param(2, True, marks=pytest.mark.slow)]
)
def test_a_restore_that_one_rank_refuses_is_told_and_counts_there_too(
    start: Start, root: Path, victim: int, fallback: bool
) -> None:
    """One rank has not looked at a save that failed, which its ``restore`` tells before it reads anything."""

    def body(rank: Rank) -> Any:
        broken = Fault("finish", error=lambda: OSError(5, "disk on fire"), times=1, nth=2)
        with rank.checkpointer(*([broken] if rank.rank == 1 else [])) as checkpointer:
            saved = save_and_wait(checkpointer, rank.state(1), 1)
            lost = checkpointer.save(rank.state(2), step=2)
            assert lost is not None
            lost.wait_done(30)
            if rank.rank != victim:
                assert lost.exception() is not None
            live = rank.state(77)
            began = time.monotonic()
            with pytest.raises(CkptError) as caught:
                checkpointer.restore(live, fallback=fallback)
            seconds = time.monotonic() - began
            assert live["b"].tobytes() == state_of(77, rank.rank, WORLD)["b"].tobytes()
            told = isinstance(caught.value, SaveFailed), str(caught.value)
            report = checkpointer.restore(live)
            assert report is not None
            return told, saved["id"] == report.generation_id, live["step"], seconds

    for rank, ((own, text), same, step, seconds) in enumerate(start().run(body)):
        assert own == (rank == victim)
        assert "disk on fire" in text
        assert own or f"run 'run': rank {victim} " in text
        assert (same, step) == (True, 1)
        assert seconds < SOON


@pytest.mark.slow
def test_a_rank_that_refuses_to_restore_is_heard_also_by_those_that_fall_back(start: Start, root: Path) -> None:
    """The damage that another rank met comes first: the others are one generation further."""

    def body(rank: Rank) -> Any:
        def damaged() -> Corrupt:
            (root / "damaged").touch()
            return Corrupt("flipped bits", object="a pack")

        faults = [Fault("read_into", error=damaged, times=1, when=lambda call: call.key.endswith(".safetensors"))]
        if rank.rank == 1:
            faults.append(Fault("finish", error=lambda: OSError(5, "disk on fire"), times=1, nth=3))
        with rank.checkpointer(*(faults if rank.rank == 1 else [])) as checkpointer:
            for step in (1, 2):
                save_and_wait(checkpointer, rank.state(step), step)
            lost = checkpointer.save(rank.state(3), step=3)
            assert lost is not None
            lost.wait_done(30)
            if rank.rank == 2:
                wait_until((root / "damaged").exists)
            else:
                assert lost.exception() is not None
            with pytest.raises(CkptError, match="rank 2 cannot restore" if rank.rank != 2 else "disk on fire"):
                checkpointer.restore(rank.state(77), fallback=True)
            report = checkpointer.restore(rank.state(77))
            assert report is not None
            return report.step

    assert start().run(body) == [2] * WORLD


# -- ranks that do not save -----------------------------------------------------------------------------
def test_a_rank_that_does_not_save_keeps_no_memory_for_it(start: Start, root: Path) -> None:
    def body(rank: Rank) -> Any:
        state = {"b": rank.state(5)["b"], "step": 5}
        with rank.checkpointer(ranks=(1,)) as checkpointer:
            checkpointer.prepare(state)
            prepared = len(checkpointer._flights._idle)
            pending = checkpointer.save(state, step=5)
            if pending is not None:
                pending.result(30)
                (root / "saved").touch()
            wait_until((root / "saved").exists)
            assert checkpointer.restore(state) is not None
            checkpointer._flights.prefaulted()
            return prepared, len(checkpointer._flights._idle)

    assert start().run(body) == [[0, 0], [1, 1], [0, 0], [0, 0]]


# -- skip -------------------------------------------------------------------------------------------------
def test_a_skip_that_the_store_decides_waits_for_no_catalog(root: Path, agent: int) -> None:
    """It is only told of it."""

    def body(rank: Rank) -> Any:
        hold = threading.Event()
        slow = [Fault("finish", hold=hold)] if rank.rank == 0 else []
        away = [Fault("skip_save", error=unreachable, times=None)]
        with rank.checkpointer(*slow, sql=away, on_busy="skip", commit_timeout=30) as checkpointer:
            first = checkpointer.save(rank.state(1), step=1)
            assert first is not None
            began = time.monotonic()
            assert checkpointer.save(rank.state(2), step=2) is None
            seconds = time.monotonic() - began
            hold.set()
            return first.result(30).id, seconds < 10

    assert Job(root, "c10d", agent=agent).run(body) == [[1, True]] * WORLD


# -- what is left -------------------------------------------------------------------------------------------
def posts_of(checkpointer: Any) -> set[tuple[str, int]]:
    """From now on: what this rank posts, and in which slot."""
    board, posted = checkpointer._context.coordination._board, set()
    post = board.post

    def noted(topic: str, slot: int, body: Mapping[str, Any]) -> Any:
        posted.add((topic, slot))
        return post(topic, slot, body)

    board.post = noted
    return posted


def test_messages_about_old_saves_and_restores_go(start: Start, root: Path) -> None:
    """Of those that were committed, failed before they began, failed later and were skipped; and of restores."""

    def body(rank: Rank) -> Any:
        broken = Fault("finish", error=lambda: OSError(5, "disk on fire"), times=1, nth=2)
        faults = [broken] if rank.rank == 1 else []
        with rank.checkpointer(*faults, on_busy="skip", commit_timeout=30) as checkpointer:
            posted = posts_of(checkpointer)
            for step in range(1, 9):
                state = rank.state(step)
                if step == 3 and rank.rank == 2:
                    state["step"] = object()
                with suppress(CkptError):
                    checkpointer.save(state, step=step)
                with suppress(CkptError):
                    checkpointer.save(rank.state(step), step=step)  # most of these are skipped
                with suppress(CkptError):
                    checkpointer.wait(30)
                if step % 3 == 0:
                    checkpointer.restore(rank.state(0))
            numbers = checkpointer._saving._next_n
            (root / f"posted-{rank.rank}.tmp").write_text(json.dumps([numbers, sorted(posted)]))
            (root / f"posted-{rank.rank}.tmp").rename(root / f"posted-{rank.rank}")
            wait_until(lambda: len(list(root.glob("posted-?"))) == WORLD)
            if rank.rank:
                return None
            told = [json.loads((root / f"posted-{other}").read_text()) for other in range(WORLD)]
            board = checkpointer._context.coordination._board
            stands = {topic for _, ours in told for topic, slot in ours if board.peek(topic, [slot])}
            return [[count for count, _ in told], len({topic for _, ours in told for topic, _ in ours}), sorted(stands)]

    counts, posted, stands = start().run(body)[0]
    assert counts == [counts[0]] * WORLD
    assert counts[0] >= 15
    assert posted > 2 * len(stands)
    numbers = {int(topic.split("/")[1]) for topic in stands if topic.startswith("save/")}
    assert all(n > counts[0] - 8 for n in numbers), stands
    assert {topic.split("/")[1] for topic in stands if topic.startswith("restore/")} == {"1"}


def test_a_rank_that_fails_after_its_acknowledgement_is_no_conflict(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its verdict tells: a warning would be about nothing."""
    monkeypatch.setattr(meeting, "LEAVE_SECONDS", 0.0)
    with ckptfmt.open(root) as repository:
        checkpointer = repository.checkpointer("run", rank=0, world_size=2, launch="a" * 32)
        context = checkpointer._context
        key = layout.generation_key(context.launch.token, context.run.key, 0)
        order = SaveOrder(n=0, step=1, key=key, tags=(), created_at="2026-01-01T00:00:00.000000Z")
        row = context.coordination.begin(order.request(30))
        assert row is not None
        part = PartReport(0, "r00000.part.json", "0" * 32, 10, 0.1, 0.1, 0)
        context.coordination.report(row, part)
        failure = Failure(0, "merge", "OSError", "the manifest cannot be written")
        with caplog.at_level(logging.WARNING, "ckptfmt"):
            tell("of a failure", lambda: context.coordination.report_failure(row, failure))
        assert caplog.text == ""
        assert context.site.sql().ranks(row.id)[0].state == "durable"
        checkpointer.close()


# -- the end ------------------------------------------------------------------------------------------------
def test_an_interrupt_while_the_coordinator_stays_for_the_others_ends_all_the_same(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    with ckptfmt.open(root) as repository:
        checkpointer = repository.checkpointer("run", rank=0, world_size=2, launch="a" * 32)
        checkpointer._flights.prefault(1 << 16)
        monkeypatch.setattr(meeting, "await_posts", interrupted)
        with pytest.raises(KeyboardInterrupt):
            checkpointer.close()
        launch, *_ = repository._connection.site.sql().launches("run")
        assert launch.closed_at is not None
        assert checkpointer._flights._idle == []
