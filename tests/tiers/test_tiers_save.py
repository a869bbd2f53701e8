"""Saving through a stage: when memory is free, what counts as saved, and what happens where the stage does not do."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import numpy as np
import pytest
from tiers_rig import TieredPlace, assert_state, eventually, named, of_pack, state_of

import ckptfmt
from ckptfmt.backends.memory import MemoryBackend
from ckptfmt.engine.save.staging import SKIPPED
from ckptfmt.errors import AccessDenied, BackendError, Corrupt, NotFound, OutOfSpace, SaveFailed, Unavailable
from ckptfmt.format import layout
from ckptfmt.format.part import decode_part
from ckptfmt.format.states import State
from ckptfmt.testing.faults import Fault

PART = layout.part_name(0)
STAGED = layout.staged_part_name(0)
PACK = layout.pack_name(0, 0)


def test_what_is_staged_is_on_the_stage_only_and_no_acknowledgement(place: TieredPlace) -> None:
    process = place.open()
    held = process.backend.add(Fault("open_writer", hold=threading.Event(), when=of_pack))
    with process.checkpointer() as checkpointer:
        pending = checkpointer.save(state_of(1), step=1)
        assert pending is not None
        pending.wait("staged", timeout=10)
        assert held.reached.wait(10)
        assert pending.stage == "staged"
        (row,) = process.rows()
        assert row.state is State.WRITING
        assert place.names(place.stage_url, row.key) == {PACK, STAGED}
        assert place.names(place.url, row.key) == set()
        eventually(lambda: process.rank().state == "staged")
        rank = process.rank()
        assert rank.staged_bytes == len(place.objects(place.stage_url)[f"runs/{row.run_key}/{row.key}/{PACK}"])
        assert (rank.part_name, rank.durable_at) == (None, None)
        assert held.hold is not None
        held.hold.set()
        assert_state(pending.result(10).load(), 1)
    rank = process.rank()
    assert rank.state == "durable"
    assert rank.staged_at is not None
    assert rank.durable_at is not None
    assert rank.staged_at <= rank.durable_at
    assert rank.replicated_bytes == rank.staged_bytes


def test_the_part_that_is_staged_is_the_one_that_is_acknowledged(place: TieredPlace) -> None:
    process = place.open()
    with process.checkpointer() as checkpointer:
        checkpointer.save(state_of(1), step=1).result(10)  # type: ignore[union-attr]
    (row,) = process.rows()
    folder = f"runs/{row.run_key}/{row.key}"
    staged, durable = place.objects(place.stage_url), place.objects(place.url)
    assert staged[f"{folder}/{STAGED}"] == durable[f"{folder}/{PART}"]
    assert staged[f"{folder}/{PACK}"] == durable[f"{folder}/{PACK}"]


def test_memory_is_free_once_it_is_staged(place: TieredPlace) -> None:
    """A second save begins while the first is still being copied, in the same memory."""
    process = place.open()
    held = process.backend.add(Fault("open_writer", hold=threading.Event(), when=of_pack, times=None))
    with process.checkpointer(in_flight_max=2) as checkpointer:
        first = checkpointer.save(state_of(1), step=1)
        assert first is not None
        first.wait("staged", timeout=10)
        assert held.reached.wait(10)
        second = checkpointer.save(state_of(2), step=2)
        assert second is not None
        second.wait("staged", timeout=10)
        flights = checkpointer._flights._flights
        assert len(flights) == 2
        assert flights[0].arena is flights[1].arena
        assert (first.stage, second.stage) == ("staged", "staged")
        assert held.hold is not None
        held.hold.set()
        assert_state(first.result(10).load(), 1)
        assert_state(second.result(10).load(), 2)


def test_without_a_stage_memory_is_free_once_it_is_acknowledged(place: TieredPlace) -> None:
    process = place.open(staged=False)
    held = process.backend.add(Fault("create", hold=threading.Event(), when=named("manifest")))
    with process.checkpointer(in_flight_max=2) as checkpointer:
        first = checkpointer.save(state_of(1), step=1)
        assert held.reached.wait(10)
        second = checkpointer.save(state_of(2), step=2)
        flights = checkpointer._flights._flights
        assert flights[0].arena is flights[1].arena
        assert held.hold is not None
        held.hold.set()
        for pending, seed in ((first, 1), (second, 2)):
            assert pending is not None
            assert_state(pending.result(10).load(), seed)


def test_a_stage_that_is_slow_stalls_nothing(place: TieredPlace) -> None:
    process = place.open()
    held = process.stage.add(Fault("open_writer", hold=threading.Event(), when=of_pack))
    with process.checkpointer() as checkpointer:
        pending = checkpointer.save(state_of(1), step=1)
        assert pending is not None
        assert held.reached.wait(10)
        assert pending.stage == "frozen"
        assert held.hold is not None
        held.hold.set()
        pending.result(10)


@pytest.mark.parametrize("many", [False, True])
def test_a_copy_that_fails_is_made_again_under_a_new_name(
    place: TieredPlace, many: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if many:
        from ckptfmt.format import pack

        monkeypatch.setattr(pack, "SPLIT_BYTES", 16_000, raising=False)
    process = place.open()
    process.backend.add(Fault("write_at", error=lambda: Unavailable("lost"), timing="torn", when=named(PACK)))
    with process.checkpointer() as checkpointer:
        assert_state(checkpointer.save(state_of(1), step=1).result(10).load(), 1)  # type: ignore[union-attr]
    (row,) = process.rows()
    assert layout.pack_name(0, 0, 1) in place.names(place.url, row.key)
    assert PACK not in place.names(place.url, row.key)
    part = decode_part(place.objects(place.url)[f"runs/{row.run_key}/{row.key}/{PART}"])
    assert part.packs[0].name == layout.pack_name(0, 0, 1)
    assert process.rank().retries == 1


def test_a_finish_whose_answer_was_lost_is_seen_to_be_there(place: TieredPlace) -> None:
    process = place.open()
    process.backend.add(Fault("finish", error=lambda: Unavailable("lost"), timing="after", when=named(PACK)))
    with process.checkpointer() as checkpointer:
        assert_state(checkpointer.save(state_of(1), step=1).result(10).load(), 1)  # type: ignore[union-attr]


def test_the_durable_tier_refuses_so_the_save_fails_and_the_stage_is_freed(place: TieredPlace) -> None:
    process = place.open()
    process.backend.add(Fault("open_writer", error=lambda: AccessDenied("not yours"), when=of_pack))
    with process.checkpointer() as checkpointer:
        pending = checkpointer.save(state_of(1), step=1)
        assert pending is not None
        assert isinstance(pending.exception(10), SaveFailed)
        checkpointer.wait(10)
        (row,) = process.rows()
        assert row.state in (State.ABORTED, State.DELETED)
        assert place.names(place.stage_url, row.key) == set()
        assert place.names(place.url, row.key) == {layout.COMMIT}
        assert_state(checkpointer.save(state_of(2), step=2).result(10).load(), 2)  # type: ignore[union-attr]


def test_bytes_that_changed_on_the_stage_are_never_acknowledged(place: TieredPlace) -> None:
    process = place.open()

    def spoil() -> BaseException:
        store = MemoryBackend(place.stage_url.partition("://")[2])._store
        (key,) = (key for key in store.objects if key.endswith(PACK))
        store.objects[key][9000] ^= 1
        return Unavailable("once more")

    process.backend.add(Fault("open_writer", error=spoil, when=of_pack))
    with process.checkpointer() as checkpointer:
        pending = checkpointer.save(state_of(1), step=1)
        assert pending is not None
        error = pending.exception(10)
        assert isinstance(error, SaveFailed)
        assert isinstance(error.__cause__, Corrupt)
        assert "'w'" in str(error.__cause__)


def test_a_stage_that_is_lost_before_the_commit_fails_the_save(place: TieredPlace) -> None:
    """Its memory is given away already: nobody has the bytes any more. The next save is none the worse."""
    process = place.open()
    held = process.backend.add(Fault("open_writer", hold=threading.Event(), when=of_pack))
    with process.checkpointer() as checkpointer:
        pending = checkpointer.save(state_of(1), step=1)
        assert pending is not None
        assert held.reached.wait(10)
        place.lose_stage()
        assert held.hold is not None
        held.hold.set()
        error = pending.exception(20)
        assert isinstance(error, SaveFailed)
        assert "no such object" in str(error)
        assert_state(checkpointer.save(state_of(2), step=2).result(10).load(), 2)  # type: ignore[union-attr]


def test_a_stage_that_is_lost_after_the_commit_is_not_missed(place: TieredPlace) -> None:
    process = place.open()
    with process.checkpointer() as checkpointer:
        generation = checkpointer.save(state_of(1), step=1).result(10)  # type: ignore[union-attr]
        checkpointer.wait(10)
        place.lose_stage()
        assert_state(generation.load(), 1)
        into = dict.fromkeys(state_of(0))
        checkpointer.restore(into, strict=False)
        assert_state(into, 1)
        assert_state(checkpointer.save(state_of(2), step=2).result(10).load(), 2)  # type: ignore[union-attr]


# -- where the stage does not do --------------------------------------------------------------------
REFUSALS = [
    ("make_folder", "before", lambda: AccessDenied("read-only")),
    ("open_writer", "before", lambda: OutOfSpace("full", needed=1, free=0)),
    ("write_at", "torn", lambda: OutOfSpace("full", needed=1, free=0)),
    ("write_at", "torn", lambda: BackendError("the disk is gone")),
    ("finish", "before", lambda: BackendError("fsync failed")),
    ("create", "before", lambda: BackendError("the disk is gone")),
    ("list", "before", lambda: BackendError("the disk is gone")),
    ("space", "before", lambda: BackendError("the disk is gone")),
]


@pytest.mark.parametrize(("op", "timing", "error"), REFUSALS)
def test_a_save_is_not_lost_for_want_of_a_stage(
    place: TieredPlace, op: str, timing: str, error: object, caplog: pytest.LogCaptureFixture
) -> None:
    process = place.open(stage={"bytes_max": 1 << 20})
    with caplog.at_level(logging.WARNING), process.checkpointer() as checkpointer:
        process.stage.add(Fault(op, error=error, timing=timing))  # type: ignore[arg-type]
        assert_state(checkpointer.save(state_of(1), step=1).result(10).load(), 1)  # type: ignore[union-attr]
        checkpointer.wait(10)
        assert SKIPPED in process.events()
        assert "straight to the durable tier" in caplog.text
        (row,) = process.rows()
        assert place.names(place.stage_url, row.key) == set()
        assert process.rank().staged_at is None
        checkpointer.save(state_of(2), step=2).result(10)  # type: ignore[union-attr]
        assert process.rank().staged_at is not None


def test_a_stage_that_is_too_small_is_not_written_to(place: TieredPlace) -> None:
    process = place.open(stage={"bytes_max": 10_000})
    with process.checkpointer() as checkpointer:
        assert_state(checkpointer.save(state_of(1), step=1).result(10).load(), 1)  # type: ignore[union-attr]
    assert process.stage.counts["open_writer"] == 0
    (event,) = [event for event in process.site.sql().events(run="run") if event.kind == SKIPPED]
    assert "10000 may be used" in event.detail["reason"]


def test_a_pack_that_is_no_longer_in_memory_cannot_go_elsewhere(place: TieredPlace) -> None:
    """Under ``host_bytes_max`` a stage that fails in the middle fails the save: it says what would help."""
    process = place.open()
    process.stage.add(Fault("finish", error=lambda: BackendError("fsync failed")))
    with process.checkpointer(host_bytes_max=64 << 20) as checkpointer:
        try:
            pending = checkpointer.save({"w": np.zeros(12 << 20)}, step=1)
        except SaveFailed as error:
            failed: BaseException | None = error
        else:
            assert pending is not None
            failed = pending.exception(20)
    assert isinstance(failed, SaveFailed)
    assert process.rows()[-1].state in (State.ABORTED, State.DELETED)


# -- what stays there -------------------------------------------------------------------------------
@pytest.mark.parametrize("keep", [0, 1, 2])
def test_the_last_commits_stay(place: TieredPlace, keep: int) -> None:
    process = place.open(stage={"keep": keep})
    with process.checkpointer() as checkpointer:
        for seed in range(4):
            checkpointer.save(state_of(seed), step=seed).result(10)  # type: ignore[union-attr]
        checkpointer.wait(10)
        kept = [row.step for row in process.rows() if place.names(place.stage_url, row.key)]
    assert kept == [0, 1, 2, 3][4 - keep :]


def test_the_next_launch_frees_what_the_last_one_left(place: TieredPlace) -> None:
    process = place.open(stage={"keep": 2})
    with process.checkpointer() as checkpointer:
        for seed in range(3):
            checkpointer.save(state_of(seed), step=seed).result(10)  # type: ignore[union-attr]
    process = place.open(stage={"keep": 1})
    with process.checkpointer() as checkpointer:
        checkpointer.save(state_of(3), step=3).result(10)  # type: ignore[union-attr]
        checkpointer.wait(10)
    assert [row.step for row in process.rows() if place.names(place.stage_url, row.key)] == [3]


def test_what_is_kept_makes_room_for_a_save(place: TieredPlace) -> None:
    process = place.open(stage={"bytes_max": 50_000, "keep": 1})  # one generation has 29 kB
    with process.checkpointer() as checkpointer:
        for seed in range(3):
            checkpointer.save(state_of(seed), step=seed).result(10)  # type: ignore[union-attr]
            checkpointer.wait(10)
            assert process.rank().staged_at is not None
    assert SKIPPED not in process.events()
    assert [row.step for row in process.rows() if place.names(place.stage_url, row.key)] == [2]


def test_runs_have_stages_of_their_own(place: TieredPlace) -> None:
    process = place.open()
    for run in ("one", "two"):
        with process.checkpointer(run) as checkpointer:
            checkpointer.save(state_of(1), step=1).result(10)  # type: ignore[union-attr]
    assert len({key.rpartition("/")[0] for key in place.objects(place.stage_url)}) == 2


def test_what_the_catalog_does_not_know_stays(place: TieredPlace, caplog: pytest.LogCaptureFixture) -> None:
    process = place.open()
    with process.checkpointer() as checkpointer:
        checkpointer.save(state_of(1), step=1).result(10)  # type: ignore[union-attr]
        (row,) = process.rows()
        stranger = f"runs/{row.run_key}/{'ab' * 16}"
        process.stage.make_folder(stranger)
        process.stage.create(f"{stranger}/{PACK}", b"x")
        for seed in (2, 3):
            checkpointer.save(state_of(seed), step=seed).result(10)  # type: ignore[union-attr]
        checkpointer.wait(10)
    assert f"{stranger}/{PACK}" in place.objects(place.stage_url)
    assert caplog.text.count("the catalog does not know") == 1


def test_no_folders_gather_on_the_stage(tmp_path: Path) -> None:
    with (
        ckptfmt.open(tmp_path / "r", stage=tmp_path / "stage") as repository,
        repository.checkpointer("run") as checkpointer,
    ):
        for seed in range(4):
            checkpointer.save(state_of(seed), step=seed).result(20)  # type: ignore[union-attr]
    assert len(list((tmp_path / "stage").glob("*/runs/*/*"))) == 1


@pytest.mark.parametrize("in_flight_max", [1, 2])
def test_a_stage_that_hangs_while_it_is_cleaned_holds_up_no_later_save(place: TieredPlace, in_flight_max: int) -> None:
    process = place.open()
    with process.checkpointer(in_flight_max=in_flight_max) as checkpointer:
        held = process.stage.add(Fault("list", hold=threading.Event()))
        first = checkpointer.save(state_of(1), step=1)
        assert first is not None
        first.result(10)
        assert held.reached.wait(10)
        saved = threading.Event()

        def save_more() -> None:
            for step in (2, 3, 4):
                checkpointer.save(state_of(step), step=step).result(10)  # type: ignore[union-attr]
            saved.set()

        thread = threading.Thread(target=save_more)
        thread.start()
        done = saved.wait(20)
        assert held.hold is not None
        held.hold.set()
        thread.join(20)
        assert done
    assert_state(process.repository.latest("run").load(), 4)
    eventually(lambda: len({name.split("/")[2] for name in place.objects(place.stage_url)}) == 1)


def test_a_stage_that_changes_while_it_is_listed_keeps_no_launch_out(place: TieredPlace) -> None:
    process = place.open()
    process.stage.add(Fault("list", error=lambda: NotFound("a folder went away")))
    with process.checkpointer() as checkpointer:
        checkpointer.save(state_of(1), step=1).result(10)  # type: ignore[union-attr]
