"""A launch keeps its lease from the moment it has it, however long stage and storage keep it from training."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import datetime
from functools import partial

import pytest
from tiers_rig import Process, TieredPlace, assert_state, eventually, named, of_pack, state_of

from ckptfmt import launching
from ckptfmt.engine import leases
from ckptfmt.engine import process as processes
from ckptfmt.engine.keep import recover
from ckptfmt.errors import AccessDenied, InvalidInput
from ckptfmt.format.states import State
from ckptfmt.testing.faults import Fault, FaultyBackend

BEAT = 0.4
"""A ``commit_timeout`` whose beat is a tenth of a second."""


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Holders of this process count as gone, and one that has no ``commit_timeout`` beats as quickly as others here."""
    monkeypatch.setattr(processes, "is_gone", lambda launch: True)
    quick = partial(leases.Lease, beat_seconds=0.1) if hasattr(leases, "Lease") else None
    monkeypatch.setattr(recover, "Lease", quick, raising=False)


def killed_with_all_staged(place: TieredPlace) -> None:
    process = place.open()
    process.backend.add(Fault("open_writer", error=process.die, when=of_pack))
    pending = process.checkpointer().save(state_of(1), step=1)
    assert pending is not None
    pending.exception(20)


def assert_kept(process: Process, held: Fault, begin: Callable[[], object]) -> None:
    """``begin`` comes to ``held``, stays there, and meanwhile the lease moves on; then it goes on."""

    def lease() -> datetime:
        launch = process.site.sql().live_launch("run")
        assert launch is not None
        return launch.lease_until

    failed: list[BaseException] = []

    def run() -> None:
        try:
            begin()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert held.hold is not None
    try:
        assert held.reached.wait(30)
        first = lease()
        eventually(lambda: lease() > first, seconds=30)
    finally:
        held.hold.set()
        thread.join(60)
    assert not failed


def test_a_stage_that_is_slow_to_clean_costs_no_lease(place: TieredPlace) -> None:
    with place.open().checkpointer() as checkpointer:
        checkpointer.save(state_of(1), step=1).result(10)  # type: ignore[union-attr]
    process = place.open()
    held = process.stage.add(Fault("list", hold=threading.Event()))
    assert_kept(process, held, lambda: process.checkpointer(commit_timeout=BEAT))


def held_up(process: Process, where: str) -> Fault:
    """While the staged part is looked at, while its pack is copied, while the durable tier is asked, or as the
    aborted generation's objects on the stage are freed."""
    places: dict[str, tuple[FaultyBackend, Fault]] = {
        "the staged part": (process.stage, Fault("read", hold=threading.Event(), when=named(".staged.json"))),
        "the pack": (process.backend, Fault("write_at", hold=threading.Event(), when=of_pack)),
        "the verdict": (process.backend, Fault("create", hold=threading.Event(), when=named("COMMIT.json"))),
        "the free objects": (process.stage, Fault("delete", hold=threading.Event())),
    }
    backend, fault = places[where]
    if where == "the free objects":
        process.backend.add(Fault("open_writer", error=lambda: AccessDenied("not yours"), when=of_pack))
        process.stage.add(Fault("head", error=lambda: AccessDenied("not yours"), when=of_pack, times=None))
    return backend.add(fault)


@pytest.mark.parametrize("who", ["a launch", "recover"])
@pytest.mark.parametrize("where", ["the staged part", "the pack", "the verdict", "the free objects"])
def test_settling_costs_no_lease_however_long_it_takes(place: TieredPlace, where: str, who: str) -> None:
    killed_with_all_staged(place)
    process = place.open()
    held = held_up(process, where)
    begin = process.repository.recover if who == "recover" else partial(process.checkpointer, commit_timeout=BEAT)
    assert_kept(process, held, begin)
    (row,) = process.rows()
    assert row.state is (State.ABORTED if where == "the free objects" else State.COMMITTED)


def test_what_is_settled_when_a_newer_launch_has_the_run_is_given_up(place: TieredPlace) -> None:
    """The pack is long to copy, and another launch takes the run over meanwhile."""
    killed_with_all_staged(place)
    process, other = place.open(), place.open()
    held = process.backend.add(Fault("write_at", hold=threading.Event(), when=of_pack))
    raised: list[BaseException] = []

    def begin() -> None:
        try:
            process.checkpointer(commit_timeout=BEAT)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=begin)
    thread.start()
    assert held.reached.wait(30)
    with other.checkpointer(takeover=True) as checkpointer:
        assert_state(checkpointer.save(state_of(2), step=2).result(10).load(), 2)  # type: ignore[union-attr]
    assert held.hold is not None
    held.hold.set()
    thread.join(60)
    assert [type(error).__name__ for error in raised] == ["Fenced"]
    assert [row.state for row in other.rows()] == [State.COMMITTED, State.COMMITTED]


@pytest.mark.parametrize("what", ["the stage", "the checkpointer"])
def test_a_launch_that_cannot_begin_leaves_nothing_running(
    place: TieredPlace, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    process = place.open()
    with monkeypatch.context() as patch:

        def refuse(*arguments: object, **named: object) -> None:
            raise InvalidInput("not this time")

        patch.setattr(launching, "_stager" if what == "the stage" else "Checkpointer", refuse)
        with pytest.raises(InvalidInput, match="not this time"):
            process.checkpointer(commit_timeout=BEAT)
    assert process.site.sql().live_launch("run") is None
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ckptfmt-lease")]
    with process.checkpointer() as checkpointer:
        checkpointer.save(state_of(1), step=1).result(10)  # type: ignore[union-attr]
