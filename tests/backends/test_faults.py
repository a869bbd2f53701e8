"""The fault wrapper does to a backend what it is told, and counts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptfmt.backends.memory import MemoryBackend, MemoryOptions
from ckptfmt.errors import Conflict, InvalidInput, NotFound, OutOfSpace, Unavailable
from ckptfmt.testing.faults import MUTATIONS, Fault, FaultyBackend


class Killed(BaseException):
    """Stands for the death of the process."""


def lost() -> Unavailable:
    return Unavailable("the answer was lost")


@pytest.fixture
def inner(tmp_path: Path) -> Iterator[MemoryBackend]:
    backend = MemoryBackend(tmp_path.name)
    yield backend
    backend.forget()


def save(backend: FaultyBackend) -> None:
    backend.make_folder("f")
    writer = backend.open_writer("f/pack", 8)
    writer.write_at(0, b"1234")
    writer.write_at(4, b"5678")
    writer.finish()
    backend.create("f/part", b"part")


def test_calls_are_counted_by_name_and_in_order(inner: MemoryBackend) -> None:
    backend = FaultyBackend(inner)
    save(backend)
    assert [call.op for call in backend.calls] == [
        "make_folder",
        "open_writer",
        "write_at",
        "write_at",
        "finish",
        "create",
    ]
    assert backend.counts["write_at"] == 2
    second = backend.calls[3]
    assert (second.number, second.nth, second.key, second.offset, second.nbytes) == (4, 2, "f/pack", 4, 4)
    assert all(call.mutates for call in backend.calls)
    backend.read("f/part", limit=4)
    assert not backend.calls[-1].mutates


def test_before_leaves_nothing_and_after_leaves_all(inner: MemoryBackend) -> None:
    backend = FaultyBackend(inner, Fault("create", error=lost), Fault("create", error=lost, timing="after"))
    with pytest.raises(Unavailable):
        backend.create("x", b"1")
    # both rules met the first call, and only one error can be raised
    with pytest.raises(NotFound):
        inner.head("x")
    backend.add(Fault("create", error=lost, timing="after"))
    with pytest.raises(Unavailable):
        backend.create("x", b"1")
    assert inner.read("x", limit=1) == b"1"
    backend.create("x", b"1")


def test_torn_writes_and_reads_do_half(inner: MemoryBackend) -> None:
    backend = FaultyBackend(inner, Fault("write_at", error=lost, timing="torn"))
    writer = backend.open_writer("x", 8)
    with pytest.raises(Unavailable):
        writer.write_at(0, b"12345678")
    assert inner.read("x", limit=100)[:8] == b"1234\0\0\0\0"
    with pytest.raises(InvalidInput, match="never written"):
        writer.finish()
    writer.abort()
    inner.create("y", b"abcdef")
    backend.add(Fault("read_into", error=lost, timing="torn"))
    buffer = bytearray(6)
    with pytest.raises(Unavailable):
        backend.read_into("y", 0, memoryview(buffer))
    assert buffer == b"abc\0\0\0"


@pytest.mark.parametrize("timing", ["before", "torn", "after"])
def test_every_mutation_is_a_crash_point(inner: MemoryBackend, timing: str) -> None:
    whole = FaultyBackend(inner)
    save(whole)
    points = [call.number for call in whole.calls if call.op in MUTATIONS]
    assert len(points) == 6
    for number in points:
        inner.forget()
        backend = FaultyBackend(inner, Fault(number=number, error=Killed, timing=timing, crash=True))  # type: ignore[arg-type]
        with pytest.raises(Killed):
            save(backend)
        assert backend.crashed
        before = inner.list("")
        backend.heal()
        for call in (lambda: backend.create("late", b""), lambda: backend.delete("f/pack"), lambda: backend.list("")):  # noqa: B023
            with pytest.raises(Killed):
                call()
        assert inner.list("") == before
        done = {info.key for info in before}
        assert ("f/part" in done) == (number == 6 and timing == "after")


def test_a_rule_fires_on_the_chosen_call_only(inner: MemoryBackend) -> None:
    backend = FaultyBackend(inner, Fault("create", error=lost, nth=2), Fault(error=lost, when=lambda c: c.key == "bad"))
    backend.create("a", b"")
    with pytest.raises(Unavailable):
        backend.create("b", b"")
    backend.create("b", b"")
    with pytest.raises(Unavailable):
        backend.create("bad", b"")
    backend.create("bad", b"")
    always = backend.add(Fault("head", error=lost, times=None))
    for _ in range(3):
        with pytest.raises(Unavailable):
            backend.head("a")
    assert always.fired == 3
    backend.heal()
    assert backend.head("a").nbytes == 0


def test_a_held_call_waits_for_its_event(inner: MemoryBackend) -> None:
    gate = threading.Event()
    fault = Fault("create", hold=gate, delay=0.01)
    backend = FaultyBackend(inner, fault)
    thread = threading.Thread(target=backend.create, args=("x", b"1"))
    thread.start()
    assert fault.reached.wait(10)
    assert inner.list("") == []
    gate.set()
    thread.join(10)
    assert inner.read("x", limit=1) == b"1"


def test_a_quota_is_out_of_space_and_comes_back(inner: MemoryBackend) -> None:
    backend = FaultyBackend(inner, quota=10)
    backend.create("a", b"12345")
    assert backend.space() == 5
    with pytest.raises(OutOfSpace, match="needed 6 bytes, free 5 bytes") as caught:
        backend.open_writer("b", 6)
    assert (caught.value.needed, caught.value.free) == (6, 5)
    backend.open_writer("b", 5).abort()
    with pytest.raises(Conflict):
        backend.create("a", b"x")
    backend.delete("a")
    backend.create("c", b"1234567890")
    assert backend.space() == 0


def test_stores_are_shared_by_name_and_bad_names_refused(inner: MemoryBackend, tmp_path: Path) -> None:
    inner.create("x", b"1")
    assert MemoryBackend(tmp_path.name).read("x", limit=1) == b"1"
    with pytest.raises(InvalidInput):
        MemoryBackend("a/b")
    with pytest.raises(InvalidInput):
        MemoryBackend("a", MemoryOptions(alignment=0))
    assert MemoryBackend("a", MemoryOptions(alignment=512)).traits.alignment == 512
