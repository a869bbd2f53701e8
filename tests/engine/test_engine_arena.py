"""The arena: grows, keeps what it has, is pinned while it lives, and is not inherited by children."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable

import pytest

from ckptfmt.engine import arena as arenas
from ckptfmt.engine.arena import Arena, available_memory, map_memory
from ckptfmt.engine.touch import address_of
from ckptfmt.errors import CkptError, OutOfSpace


def test_memory_is_aligned_zeroed_and_writable() -> None:
    for nbytes in (1, 4096, 5 << 20):
        view = map_memory(nbytes)
        assert view.nbytes >= nbytes
        assert address_of(view) % mmap.PAGESIZE == 0
        assert view[0] == view[nbytes - 1] == 0
        view[nbytes - 1] = 7


def test_it_grows_only_when_it_has_to_and_keeps_its_address() -> None:
    arena = Arena()
    assert arena.reserve(1 << 20)
    where = address_of(arena.view(0, 10))
    assert not arena.reserve(1 << 19)
    assert address_of(arena.view(0, 10)) == where
    assert arena.reserve(8 << 20)
    arena.populate()
    assert bytes(arena.view(8 << 20, 0)) == b""
    arena.drop()
    assert arena.nbytes == 0


def test_what_is_trimmed_goes_back_and_can_be_used_again() -> None:
    arena = Arena()
    arena.reserve(8 << 20)
    arena.view(0, 8 << 20)[:] = b"x" * (8 << 20)
    arena.mark_touched(8 << 20)
    arena.trim((3 << 20) + 1)
    assert bytes(arena.view((4 << 20) - 1, 2)) == b"x\0"  # anonymous memory given back reads as zeros
    assert bytes(arena.view((8 << 20) - 1, 1)) == b"\0"
    where = address_of(arena.view(0, 1))
    assert not arena.reserve(8 << 20)
    arena.populate()
    assert address_of(arena.view(0, 1)) == where
    arena.trim(8 << 20)
    arena.drop()
    arena.trim(0)
    assert arena.nbytes == 0


def test_what_was_given_back_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the process is killed for memory, where a save could have been refused."""
    room = 100 << 20
    monkeypatch.setattr(arenas, "available_memory", lambda: room)
    arena = Arena()
    arena.reserve(8 << 20)
    room = 0  # it was granted, be it touched or not
    assert not arena.reserve(8 << 20)
    arena.mark_touched(8 << 20)
    arena.trim(2 << 20)
    assert not arena.reserve(2 << 20)
    for _ in range(2):
        with pytest.raises(OutOfSpace, match=f"needs {6 << 20} more bytes of host memory but only 0"):
            arena.reserve(8 << 20)
    room = 6 << 20
    assert not arena.reserve(8 << 20)
    room = 0
    assert not arena.reserve(8 << 20)


def test_too_much_is_refused_before_anything_is_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arenas, "available_memory", lambda: 1000)
    arena = Arena()
    with pytest.raises(OutOfSpace, match="needs 5000 more bytes of host memory but only 1000") as caught:
        arena.reserve(5000)
    assert (caught.value.needed, caught.value.free) == (5000, 1000)
    assert arena.nbytes == 0


def test_this_machine_tells_how_much_there_is() -> None:
    room = available_memory()
    assert room is not None
    assert room > 1 << 20


def test_each_region_is_pinned_once_and_unpinned_before_it_goes() -> None:
    log: list[str] = []

    def pin(memory: memoryview) -> Callable[[], None]:
        log.append(f"pin {memory.nbytes}")
        return lambda: log.append(f"unpin {memory.nbytes}")

    arena = Arena(pin)
    arena.reserve(4096)
    arena.reserve(100)
    arena.reserve(8192)
    arena.drop()
    arena.drop()
    assert log == ["pin 4096", "unpin 4096", "pin 8192", "unpin 8192"]
    arena.reserve(8 << 20)
    arena.trim(1 << 20)
    assert arena.nbytes == 0
    assert log[4:] == [f"pin {8 << 20}", f"unpin {8 << 20}"]


def test_a_refused_pin_is_said_and_survived(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(memory: memoryview) -> Callable[[], None]:
        raise CkptError("cudaHostRegister failed with CUDA error 2", kind="pin_failed")

    arena = Arena(refuse)
    assert arena.reserve(4096)
    assert "device copies will be slower: cudaHostRegister" in caplog.text
    arena.view(0, 10)[:] = b"0123456789"
    arena.drop()


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="needs /proc/self/smaps")
def test_children_do_not_inherit_it() -> None:
    arena = Arena()
    arena.reserve(4 << 20)
    start = address_of(arena.view(0, 1))
    flags: list[str] = []
    inside = False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            head = line.split()[0]
            if "-" in head and ":" not in head:
                low, high = (int(part, 16) for part in head.split("-"))
                inside = low <= start < high
            if inside and line.startswith("VmFlags:"):
                flags = line.split()[1:]
                break
    assert "dc" in flags  # MADV_DONTFORK
