"""Whatever fails, nobody gets memory back while a device still writes to it."""

from __future__ import annotations

import array
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from stages_fixtures import UNIT, WINDOW, make_small
from test_engine_ports import ArrayFamilyOfTheStandardLibrary, LateCapture, Updater

from ckptfmt.engine.arena import Arena
from ckptfmt.engine.families import Families
from ckptfmt.engine.save.deferral import watch_owned
from ckptfmt.engine.save.freeze import freeze_tree
from ckptfmt.engine.save.snapshot import Planner, Snapshot, take_snapshot
from ckptfmt.errors import CkptError
from ckptfmt.ports.arrays import wait_all

NUMBERS = 40 * UNIT // 8


class First(array.array):  # type: ignore[type-arg]
    """Numbers on one device."""


class Second(array.array):  # type: ignore[type-arg]
    """Numbers on another one."""


class FailingCapture(LateCapture):
    """Ends with an error."""

    def wait(self) -> None:
        super().wait()
        raise CkptError("the first device is lost")


class SilentCapture(FailingCapture):
    """Can't say how far it is."""

    def ready(self, index: int) -> bool:
        raise CkptError("the first device is lost")


class Device(ArrayFamilyOfTheStandardLibrary):
    """A library of its own, for one type."""

    def __init__(self, kind: type, *, refuses: str | None = None, makes: type[LateCapture] = LateCapture) -> None:
        super().__init__()
        self._kind, self._refuses, self._makes = kind, refuses, makes
        if makes is LateCapture and refuses is None:
            self.go.clear()

    def owns(self, value: Any) -> bool:
        return type(value) is self._kind

    def capture(self, pairs: Sequence[tuple[Any, memoryview]]) -> LateCapture:
        if self._refuses is not None:
            raise CkptError(self._refuses)
        self.captures.append(self._makes(pairs, self.go))
        return self.captures[-1]

    def go_in(self, seconds: float) -> None:
        threading.Timer(seconds, self.go.set).start()

    def ended(self) -> bool:
        """Whether it has anything to copy, and has ended it."""
        return bool(self.captures) and not any(capture._thread.is_alive() for capture in self.captures)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch)


def take(state: Any, *devices: Device, deferred: bool = False, host_bytes_max: int | None = None) -> Snapshot:
    return take_snapshot(
        state,
        None,
        families=Families(list(devices)),
        planner=Planner(),
        arena=Arena(),
        host_bytes_max=host_bytes_max,
        deferred=deferred,
    )


def both() -> dict[str, Any]:
    return {"a": First("q", range(NUMBERS)), "b": Second("q", range(NUMBERS))}


def test_a_second_device_that_takes_nothing_leaves_the_first_one_to_end() -> None:
    late, refusing = Device(First), Device(Second, refuses="no stream to be had")
    late.go_in(0.2)
    with pytest.raises(CkptError, match="no stream to be had"):
        take(both(), late, refusing)
    assert late.ended()


def test_the_same_of_what_an_optimizer_owns() -> None:
    late, refusing = Device(First), Device(Second, refuses="no stream to be had")
    state = both()
    state["optimizer"] = Updater(refusing, [state["b"]])
    late.go_in(0.2)
    with pytest.raises(CkptError, match="no stream to be had"):
        take(state, late, refusing, deferred=True)
    assert late.ended()


def test_the_same_of_what_passes_through_the_window() -> None:
    state = {f"a{i}": (First, Second)[i % 2]("q", range(UNIT // 16)) for i in range(24)}
    late, refusing = Device(First), Device(Second, refuses="no stream to be had")
    snapshot = take(state, late, refusing, host_bytes_max=WINDOW)
    late.go_in(0.2)
    with pytest.raises(CkptError, match="no stream to be had"):
        snapshot.freeze()
    assert late.ended()


@pytest.mark.parametrize("way", ["freeze", "wait"])
def test_a_device_that_fails_does_not_end_the_waiting_for_another(way: str) -> None:
    failing, late = Device(First, makes=FailingCapture), Device(Second)
    snapshot = take(both(), failing, late)
    late.go_in(0.2)
    with pytest.raises(CkptError, match="the first device is lost"):
        getattr(snapshot, way)()
    assert late.ended()


def test_the_same_while_units_are_copied() -> None:
    state = {f"a{i}": (First, Second)[i % 2]("q", range(UNIT // 16)) for i in range(24)}
    failing, late = Device(First, makes=FailingCapture), Device(Second)
    snapshot = take(state, failing, late, host_bytes_max=WINDOW)
    late.go_in(0.2)
    with pytest.raises(CkptError, match="the first device is lost"):
        snapshot.freeze()
    assert late.ended()


def test_a_device_that_cannot_say_how_far_it_is_leaves_another_to_end() -> None:
    failing, late = Device(First, makes=SilentCapture), Device(Second)
    state = both()
    state["optimizer"] = Updater(failing, [state["a"]])
    late.go_in(0.2)
    with pytest.raises(CkptError, match="the first device is lost"):
        take(state, failing, late, deferred=True)
    assert late.ended()


@pytest.mark.parametrize("owned", ["a", "b"])
def test_the_copying_thread_is_waited_for_though_a_device_fails(monkeypatch: pytest.MonkeyPatch, owned: str) -> None:
    failing, late = Device(First, makes=FailingCapture), Device(Second)
    failing.go.clear()
    state = both()
    state["optimizer"] = Updater(failing if owned == "a" else late, [state[owned]])
    snapshot = take(state, failing, late, deferred=True)
    assert snapshot.deferral is not None
    settled: list[bool] = []
    monkeypatch.setattr(snapshot.deferral, "settle", lambda: settled.append(late.ended()))
    failing.go.set()
    late.go_in(0.2)
    with pytest.raises(CkptError, match="the first device is lost"):
        snapshot.wait()
    assert settled == [True]


def test_an_interrupt_does_not_end_the_waiting_and_a_second_one_does() -> None:
    log: list[str] = []
    interrupts = [KeyboardInterrupt("first"), KeyboardInterrupt("second")]

    def interrupted() -> None:
        log.append("waits")
        if interrupts:
            raise interrupts.pop(0)

    with pytest.raises(KeyboardInterrupt, match="first"):
        wait_all([interrupted, lambda: log.append("next")])
    assert log == ["waits", "waits"]
    interrupts.append(KeyboardInterrupt("third"))
    with pytest.raises(KeyboardInterrupt, match="third"):
        wait_all([interrupted, lambda: log.append("next")])
    assert log[2:] == ["waits", "waits", "next"]
    wait_all([interrupted])
    with pytest.raises(CkptError, match="before"):
        wait_all([interrupted], CkptError("before"))
    assert log[5:] == ["waits", "waits"]


def test_what_stands_in_the_state_is_not_described_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be tens of thousands, and training is blocked meanwhile."""
    device = Device(First, makes=FailingCapture)
    inside, outside = (First("q", range(10)) for _ in range(2))
    families = Families([device])
    frozen = freeze_tree({"a": inside, "optimizer": Updater(device, [inside, outside])}, families)
    described: list[Any] = []
    describe = device.describe
    monkeypatch.setattr(device, "describe", lambda value, path: (described.append(value), describe(value, path))[1])
    watches = watch_owned(frozen.leaves, frozen.owners, families)
    assert [value is outside for value in described] == [True]
    assert {index: [watch.value is inside for watch in of] for index, of in watches.items()} == {0: [True]}
