"""Clocks that jump: the database's own, by which leases and deadlines are told."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from lifecycle_rig import Place, assert_state, ended, state_of

from ckptfmt.catalog import snapshot
from ckptfmt.engine import leases
from ckptfmt.engine.save import launch as launches
from ckptfmt.errors import Conflict, SaveFailed
from ckptfmt.format import layout
from ckptfmt.testing.faults import Fault

HOUR = 3600.0
LEASE = 0.8


class Clock:
    """The clock of every catalog in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead = 0.0
        """Seconds."""
        monkeypatch.setattr(snapshot, "_statement", self._statement)

    def _statement(self, template: str) -> str:
        now = f"strftime('%Y-%m-%d %H:%M:%f000', 'now', '{self.ahead:+.3f} seconds')"
        return template.replace("{now}", now).replace("{locked}", "")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whoever asks for the lease does so from another host: it can tell nothing about the holder's process."""
    with monkeypatch.context() as patch:
        patch.setattr(launches.process, "host_name", lambda: "elsewhere")
        yield


def test_the_order_of_commits_survives_every_jump(place: Place, clock: Clock) -> None:
    """FR-040: the clock goes back by hours between two saves, and forward; the latest is the last commit."""
    process = place.open()
    with process.checkpointer() as checkpointer:
        for step, ahead in enumerate((0.0, -HOUR, 2 * HOUR, -3 * HOUR), start=1):
            clock.ahead = ahead
            pending = checkpointer.save(state_of(step), step=step)
            assert pending is not None
            pending.result()
    assert [info.step for info in process.repository.generations()] == [4, 3, 2, 1]
    parents = [row.parent_key for row in process.rows()]
    assert parents == [None, *(row.key for row in process.rows()[:-1])]
    with place.open().checkpointer() as checkpointer:
        report = checkpointer.restore(dict.fromkeys(state_of(0)), strict=False)
        assert report is not None
        assert report.step == 4


@pytest.mark.parametrize("jump", [-HOUR, 2 * HOUR])
def test_a_jump_in_the_middle_of_a_save_does_not_end_it(place: Place, clock: Clock, jump: float) -> None:
    """Its deadline is its own process's, which no clock moves."""
    hold = threading.Event()
    fault = Fault("write_at", hold=hold)
    process = place.open(fault)
    with process.checkpointer(commit_timeout=60) as checkpointer:
        pending = checkpointer.save(state_of(1), step=1)
        assert pending is not None
        assert fault.reached.wait(10)
        clock.ahead = jump
        hold.set()
        assert_state(pending.result().load(), 1)


def test_a_jump_forward_lets_others_in_and_the_older_launch_commits_nothing(
    place: Place, clock: Clock, elsewhere: None
) -> None:
    """FR-121: its lease has lapsed by the only clock that counts, though it is alive; the fence decides."""
    hold = threading.Event()
    fault = Fault("create", hold=hold, when=lambda call: call.key.endswith(".part.json"))
    first = place.open(fault)
    pending = first.checkpointer().save(state_of(1), step=1)
    assert pending is not None
    assert fault.reached.wait(10)
    clock.ahead = 2 * HOUR
    second = place.open()
    with second.checkpointer() as checkpointer:  # no takeover, no waiting
        assert ended(second.row())
        checkpointer.save(state_of(2), step=2)
    hold.set()
    assert isinstance(pending.exception(20), SaveFailed)
    assert [row.step for row in second.rows() if row.commit_seq is not None] == [2]


@contextmanager
def _held(place: Place, *, alive: bool) -> Iterator[None]:
    """A launch of another host, which renews its lease or has died."""
    catalog = place.open().catalog
    catalog.ensure_run("run", layout.run_key("run"))
    launch = launches.acquire(catalog, "run", token="held", takeover=False, lease_seconds=LEASE)
    lease = leases.Lease(catalog, launch, lease_seconds=LEASE, beat_seconds=0.05) if alive else None
    try:
        yield
    finally:
        if lease is not None:
            lease.close()


@pytest.mark.slow
def test_a_clock_that_goes_back_does_not_lock_a_run_for_as_long(
    place: Place, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dead holder's lease would last an hour more by the database's clock; silent for a lease, it is gone."""
    with monkeypatch.context() as patch:
        patch.setattr(launches.process, "host_name", lambda: "elsewhere")
        with _held(place, alive=False):
            clock.ahead = -HOUR
    began = time.monotonic()
    launches.acquire(place.open().catalog, "run", token="next", takeover=False, lease_seconds=LEASE)
    assert LEASE <= time.monotonic() - began < 10


def test_a_holder_that_renews_over_a_jump_back_is_alive(
    place: Place, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its renewals lower the time at which the lease ends, and are renewals all the same."""
    monkeypatch.setattr(launches.process, "is_gone", lambda holder: False)
    monkeypatch.setattr(launches, "_is_self", lambda holder, request: False)
    with _held(place, alive=True):
        clock.ahead = -HOUR
        with pytest.raises(Conflict, match="held by"):
            launches.acquire(place.open().catalog, "run", token="next", takeover=False, lease_seconds=LEASE)


@pytest.mark.parametrize("who", ["recover", "gc"])
def test_the_grace_begins_when_nobody_can_open_the_generation_any_more(place: Place, clock: Clock, who: str) -> None:
    """Whoever retired it died before its tombstone: until that is made, readers without the catalog could open it."""
    process = place.open()
    with process.checkpointer() as checkpointer:
        for step in (1, 2):
            checkpointer.save(state_of(step), step=step)
    first = process.rows()[0]
    process.catalog.retire(first.id)
    clock.ahead = 2 * HOUR  # the grace after the retirement is over
    if who == "recover":
        foretold = process.repository.recover(dry_run=True).actions
        assert [action.action for action in foretold] == ["closed"]
        assert process.repository.recover().actions == foretold
    assert not process.repository.gc(dry_run=False).items
    assert not process.repository.gc(dry_run=False).items
    clock.ahead = 3.1 * HOUR
    assert len(process.repository.gc(dry_run=False).items) == 3
    assert_state(process.repository.latest().load(), 2)
