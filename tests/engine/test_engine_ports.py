"""A third array library joins through the port alone: the engine knows neither it nor how it copies."""

from __future__ import annotations

import array
import dataclasses
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ckptfmt import connect
from ckptfmt.engine.families import Families
from ckptfmt.errors import BackendError, SaveFailed
from ckptfmt.ports.arrays import Expansion, LeafSpec, Ownership
from ckptfmt.repository import Repository
from ckptfmt.testing.faults import Fault, FaultyBackend


class LateCapture:
    """Copies on a thread of its own, and not before ``go``: like a device that is behind."""

    def __init__(self, pairs: Sequence[tuple[Any, memoryview]], go: threading.Event) -> None:
        self.fenced = False
        self._thread = threading.Thread(target=self._copy, args=(list(pairs), go))
        self._thread.start()

    def _copy(self, pairs: list[tuple[Any, memoryview]], go: threading.Event) -> None:
        go.wait(30)
        for value, host in pairs:
            host[:] = value.tobytes()

    def ready(self, index: int) -> bool:
        return not self._thread.is_alive()

    def wait_for(self, index: int) -> None:
        self._thread.join()

    def wait(self) -> None:
        self._thread.join()

    def fence(self) -> None:
        self.fenced = True


class Updater:
    """Alone changes ``values``, on a device that works in order: a change waits for the captures that were fenced."""

    def __init__(self, family: ArrayFamilyOfTheStandardLibrary, values: list[Any]) -> None:
        self.listeners: list[Callable[[], None]] = []
        self.updates = 0
        self._family = family
        self._values = values

    def announce(self, before: Callable[[], None]) -> Callable[[], None]:
        self.listeners.append(before)
        return lambda: self.listeners.remove(before)

    def update(self) -> None:
        for before in tuple(self.listeners):
            before()
        self.change()

    def change(self) -> None:
        self.updates += 1
        for capture in self._family.captures:
            if capture.fenced:
                capture.wait()
        for value in self._values:
            value[:] = array.array("q", [number + 1 for number in value])

    def owned(self) -> Ownership:
        return Ownership(lambda _: self._values, self.announce, lambda _: self.updates)


class ArrayFamilyOfTheStandardLibrary:
    """``array.array("q")`` as an array family."""

    name = "tensor"

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()
        self.captures: list[LateCapture] = []

    def owns(self, value: Any) -> bool:
        return isinstance(value, array.array)

    def owns_object(self, value: Any) -> bool:
        return isinstance(value, Updater)

    def expand(self, objects: Any, leaves: Any) -> list[Expansion]:
        return [
            Expansion("stateful", "Updater", {"updates": each.updates}, live=False, owned=each.owned())
            for _, each in objects
        ]

    def describe(self, value: Any, path: str, known: LeafSpec | None = None) -> LeafSpec:
        shape = (len(value),)
        return LeafSpec("int64", shape, (0,), shape, 8 * len(value), "replicated", id(value))

    def boxes(self, value: Any, path: str) -> None:
        return None

    def coordinates(self, value: Any) -> dict[str, int]:
        return {}

    def host_address(self, value: Any) -> int | None:
        return None

    def capture(self, pairs: Sequence[tuple[Any, memoryview]]) -> LateCapture:
        self.captures.append(LateCapture(pairs, self.go))
        return self.captures[-1]

    def piece(self, value: Any, start: int, stop: int) -> Any:
        return value[start // 8 : stop // 8]

    def fill(self, pairs: Sequence[tuple[Any, memoryview]]) -> LateCapture:
        for value, host in pairs:
            value[:] = array.array("q", bytes(host))
        return LateCapture([], self.go)

    def fill_cast(self, value: Any, saved_dtype: str, host: memoryview) -> None:
        raise AssertionError("nothing is cast here")

    def check_cast(self, value: Any, saved_dtype: str) -> str | None:
        raise AssertionError("nothing is cast here")

    def wrote_to(self, values: Sequence[Any]) -> None:
        pass

    def check_fillable(self, value: Any, path: str) -> str | None:
        return None

    def takes(self, value: Any, dtype: str, shape: tuple[int, ...]) -> int | None:
        return None

    def build(self, spec: LeafSpec, host: memoryview, flags: Sequence[str], device: Any | None) -> Any:
        return array.array("q", bytes(host))

    def pin(self, memory: memoryview) -> Callable[[], None]:
        return lambda: None


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> ArrayFamilyOfTheStandardLibrary:
    made = ArrayFamilyOfTheStandardLibrary()
    monkeypatch.setattr(connect, "live_families", lambda: Families([made]))
    monkeypatch.setattr(connect, "families_for", lambda framework, *, saved_torch: Families([made]))
    return made


def repository(root: Path, *faults: Fault) -> Repository:
    connection = connect.open_site(root, mode="w", catalog=None, storage_options=None)
    site = dataclasses.replace(connection.site, backend=FaultyBackend(connection.site.backend, *faults))
    return Repository(dataclasses.replace(connection, site=site), "w")


def test_a_foreign_library_saves_loads_and_restores(tmp_path: Path, family: ArrayFamilyOfTheStandardLibrary) -> None:
    state = {"a": array.array("q", range(3_000_000)), "b": [array.array("q", [7])], "n": 1}
    with repository(tmp_path) as repo, repo.checkpointer("run") as ckpt:
        pending = ckpt.save(state, step=1)
        assert pending is not None
        assert pending.result().load() == state
        into = {"a": array.array("q", [0] * 3_000_000), "b": [array.array("q", [0])], "n": 0}
        ckpt.restore(into)
    assert into == state


def test_save_returns_only_when_a_late_device_has_copied(
    tmp_path: Path, family: ArrayFamilyOfTheStandardLibrary
) -> None:
    """What is changed right after ``save`` must not reach storage, however far behind the device is."""
    value = array.array("q", [1] * 100_000)
    with repository(tmp_path) as repo, repo.checkpointer("run") as ckpt:
        family.go.clear()
        threading.Timer(0.4, family.go.set).start()
        pending = ckpt.save({"a": value}, step=1)
        value[:] = array.array("q", [2] * 100_000)
        assert pending is not None
        assert pending.stall_seconds > 0.3
        assert pending.result().load() == {"a": array.array("q", [1] * 100_000)}
        assert repo.generations()[0].stall_seconds == pytest.approx(pending.stall_seconds, rel=1e-6)


def test_a_failed_save_gives_the_arena_back_only_when_the_copies_have_ended(
    tmp_path: Path, family: ArrayFamilyOfTheStandardLibrary
) -> None:
    first, second = array.array("q", [1] * 100_000), array.array("q", [2] * 100_000)
    fault = Fault("open_writer", error=lambda: BackendError("the disk is broken"), times=1)
    with repository(tmp_path, fault) as repo, repo.checkpointer("run") as ckpt:
        family.go.clear()
        threading.Timer(0.4, family.go.set).start()
        failing = ckpt.save({"a": first}, step=1)
        assert failing is not None
        assert isinstance(failing.exception(timeout=20), SaveFailed)
        assert not family.captures[0]._thread.is_alive()
        pending = ckpt.save({"a": second}, step=2)
        assert pending is not None
        assert pending.result().load() == {"a": second}


def test_a_deferred_save_lets_a_foreign_optimizer_go_on(
    tmp_path: Path, family: ArrayFamilyOfTheStandardLibrary
) -> None:
    """Only what it owns is deferred, and its device waits where the host does not."""
    value, other = array.array("q", [1] * 100_000), array.array("q", [5] * 10)
    updater = Updater(family, [value])
    with repository(tmp_path) as repo, repo.checkpointer("run", freeze="deferred") as ckpt:
        pending = ckpt.save({"other": other, "updater": updater}, step=1)
        assert pending is not None
        assert pending.stage != "freezing"
        pending.result()
        family.go.clear()
        pending = ckpt.save({"value": value, "updater": updater}, step=2)
        assert pending is not None
        assert pending.stage == "freezing"
        threading.Timer(0.3, family.go.set).start()
        updater.update()
        assert value[0] == 2
        assert pending.stall_seconds < 0.2
        assert pending.result().load()["value"] == array.array("q", [1] * 100_000)
    assert not updater.listeners


def test_a_change_that_was_not_announced_fails_a_deferred_save(
    tmp_path: Path, family: ArrayFamilyOfTheStandardLibrary
) -> None:
    value = array.array("q", [1] * 100_000)
    updater = Updater(family, [value])
    with repository(tmp_path) as repo, repo.checkpointer("run", freeze="deferred") as ckpt:
        family.go.clear()
        pending = ckpt.save({"value": value, "updater": updater}, step=1)
        assert pending is not None
        updater.change()
        threading.Timer(0.2, family.go.set).start()
        updater.update()
        with pytest.raises(SaveFailed, match="value: changed while it was being copied"):
            pending.result()
