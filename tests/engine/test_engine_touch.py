"""Memory is touched ahead of those who fill it, and in steps that hold nobody up for long."""

from __future__ import annotations

import ctypes
import sys
import threading
from typing import Any

import numpy as np
import pytest

from ckptfmt.engine import touch
from ckptfmt.engine.arena import map_memory

MIB = 1 << 20
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="madvise")


class Advised:
    """Stands before the C library: what was advised, by which thread."""

    def __init__(self, plain: Any, *, fails: bool = False) -> None:
        self._plain, self._fails = plain, fails
        self.ranges: list[tuple[int, int]] = []
        self.threads: set[str] = set()

    def madvise(self, address: ctypes.c_void_p, length: ctypes.c_size_t, advice: int) -> int:
        assert address.value is not None
        self.ranges.append((address.value, length.value))
        self.threads.add(threading.current_thread().name)
        return -1 if self._fails else int(self._plain.madvise(address, length, advice))


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch) -> Advised:
    found = Advised(touch._libc)
    monkeypatch.setattr(touch, "_libc", found)
    return found


def _covered(ranges: list[tuple[int, int]], view: memoryview) -> bool:
    """Whether the ranges are all of the view, none of them twice."""
    at = touch.address_of(view)
    for address, length in sorted(ranges):
        if address != at:
            return False
        at += length
    return at == touch.address_of(view) + view.nbytes


@pytest.mark.parametrize("nbytes", [4096, 2 * MIB, 33 * MIB, 70 * MIB + 4096])
def test_all_is_touched_in_small_steps(advised: Advised, nbytes: int) -> None:
    view = map_memory(nbytes)[:nbytes]
    touch.populate(view)
    assert _covered(advised.ranges, view)
    assert max(length for _, length in advised.ranges) <= 2 * MIB


def test_where_the_system_cannot_it_is_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(touch, "_libc", Advised(touch._libc, fails=True))
    view = map_memory(33 * MIB)
    np.frombuffer(view, np.uint8)[:] = 1
    touch.populate(view)
    assert not np.frombuffer(view, np.uint8).any()


def test_nothing_is_touched_ahead_before_those_who_fill_it_run(advised: Advised) -> None:
    """While memory is touched no thread can start."""
    view = map_memory(70 * MIB)
    with touch.touched_ahead(view):
        pass
    assert not advised.ranges
    with touch.touched_ahead(view) as begin:
        np.frombuffer(view, np.uint8)[:] = 7
        begin()
        while len(advised.ranges) < 35:
            assert threading.Event().wait(0.01) is False
    assert _covered(advised.ranges, view)
    assert advised.threads == {"ckptfmt-touch"}
    assert (np.frombuffer(view, np.uint8) == 7).all(), "what was written stays"


def test_it_ends_with_those_who_fill_it(advised: Advised) -> None:
    view = map_memory(512 * MIB)
    with touch.touched_ahead(view) as begin:
        begin()
    assert not _covered(advised.ranges, view)
    assert not [thread for thread in threading.enumerate() if thread.name == "ckptfmt-touch"]


def test_a_little_is_touched_by_who_fills_it(advised: Advised) -> None:
    with touch.touched_ahead(map_memory(2 * MIB)) as begin:
        begin()
    assert not advised.ranges


def test_without_more_threads_nothing_is_touched_ahead(advised: Advised, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with touch.touched_ahead(map_memory(70 * MIB)) as begin:
        begin()
    assert not advised.ranges
