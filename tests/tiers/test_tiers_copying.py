"""Copies of packs: all bytes once, nothing handed on that was not compared, whatever the layout."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfmt.backends.memory import MemoryBackend
from ckptfmt.backends.posix import PosixBackend
from ckptfmt.engine import packs, replicate, units
from ckptfmt.engine.arena import Arena
from ckptfmt.engine.families import Families
from ckptfmt.engine.packs import PackToCopy, packs_to_copy
from ckptfmt.engine.replicate import Copying, Pace, Source
from ckptfmt.engine.save.context import ALONE
from ckptfmt.engine.save.parts import make_part
from ckptfmt.engine.save.persist import write_packs
from ckptfmt.engine.save.snapshot import Planner, take_snapshot
from ckptfmt.errors import BackendError, Conflict, Corrupt, Fenced, NotFound, OutOfSpace, Unavailable
from ckptfmt.format import checksum
from ckptfmt.testing.faults import Fault, FaultyBackend
from ckptfmt.testing.syscalls import WatchedSyscalls

UNIT = 1 << 16
FOLDER = "f"
_numbers = itertools.count()


@pytest.fixture(autouse=True, scope="module")
def _small() -> Iterator[None]:
    """What is 8 MiB elsewhere is 64 KiB."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(units, "IO_BYTES", UNIT)
        patch.setattr(packs, "IO_BYTES", UNIT)
        patch.setattr(checksum, "CHUNK_BYTES", UNIT)
        patch.setattr(replicate, "_PAUSE_SECONDS", 0.0)
        yield


def place(*faults: Fault) -> FaultyBackend:
    backend = FaultyBackend(MemoryBackend(f"copying{next(_numbers)}"), *faults)
    backend.make_folder(FOLDER)
    return backend


def written(sizes: list[int]) -> tuple[FaultyBackend, list[PackToCopy]]:
    """A place with the packs of a state of byte strings and arrays of these sizes."""
    state: dict[str, Any] = {}
    for number, size in enumerate(sizes):
        values = np.random.default_rng(number).integers(0, 256, size=size, dtype=np.uint8)
        state[f"t{number}"] = values if size % 8 else values.view(np.int64)
    backend = place()
    snapshot = take_snapshot(state, None, families=Families(), planner=Planner(), arena=Arena())
    snapshot.freeze()
    done = write_packs(backend, FOLDER, 0, snapshot, give_up=lambda: None, passing=lambda error: None)
    part = make_part(
        snapshot,
        done,
        key="ab" * 16,
        step=1,
        launch_digest="cd" * 16,
        save_number=0,
        ranks=ALONE,
        created_at="2026-01-01T00:00:00Z",
    )
    return backend, packs_to_copy(part)


def named(packs: list[PackToCopy]) -> replicate.Names:
    return lambda position, attempt: packs[position].row.name + (f"-{attempt}" if attempt else "")


def content(backend: FaultyBackend, name: str) -> bytes:
    return backend.read(f"{FOLDER}/{name}", limit=1 << 30)


SIZES = st.lists(st.one_of(st.integers(0, 300), st.integers(4000, 9000), st.integers(60_000, 300_000)), max_size=12)


@settings(max_examples=60, deadline=None)
@given(SIZES)
def test_a_copy_is_the_same(sizes: list[int]) -> None:
    source, packs = written(sizes)
    for pack in packs:
        spans = pack.spans
        assert [span.start for span in spans] == [0, *(span.stop for span in spans[:-1])]
        assert spans[-1].stop == pack.row.nbytes
        assert all(span.stop % units.ALIGNMENT == 0 for span in spans[:-1])
        assert all(0 <= span.end - span.stop < units.ALIGNMENT for span in spans)
        chunks = [chunk for span in spans for chunk in span.chunks]
        assert sum(nbytes for *_, nbytes in chunks) == sum(size for size in sizes)
    target, copied = place(), []
    copying = Copying([Source(source)], target, FOLDER, Pace(copied=copied.append))
    names = copying.copy(packs, named(packs))
    assert names == [pack.row.name for pack in packs]
    assert [content(target, name) for name in names] == [content(source, name) for name in names]
    assert sum(copied) == sum(pack.row.nbytes for pack in packs)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_one_wrong_byte_anywhere_is_never_handed_on(data: st.DataObject) -> None:
    source, packs = written([70_000, 5000, 130_000, 17])
    (pack,) = packs
    at = data.draw(st.integers(0, pack.row.nbytes - 1))
    store = source._inner._store.objects[f"{FOLDER}/{pack.row.name}"]  # type: ignore[attr-defined]
    store[at] ^= 1 << data.draw(st.integers(0, 7))
    target = place()
    with pytest.raises(Corrupt):
        Copying([Source(source)], target, FOLDER).copy(packs, named(packs))
    assert target.list(FOLDER) == []


def test_a_byte_that_two_reads_share_may_not_differ() -> None:
    """Where a chunk ends within a page the next span begins with that page, and reads it again."""
    source, packs = written([70_000, 70_001, 70_003])
    (pack,) = packs
    span = next(span for span in pack.spans if span.end > span.stop)
    reads: list[int] = []

    class Flickering:
        def __getattr__(self, name: str) -> Any:
            return getattr(source, name)

        def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
            source.read_into(key, offset, buffer)
            if offset == span.stop:  # the second read of that page: all chunks that begin in it are as they were
                reads.append(offset)
                buffer[0] ^= 1

    with pytest.raises(Corrupt, match=f"read twice at offset {span.stop}"):
        Copying([Source(Flickering())], place(), FOLDER).copy(packs, named(packs))  # type: ignore[arg-type]
    assert reads


@pytest.mark.parametrize("bad", ["damaged", "absent", "short", "away"])
def test_the_next_source_is_tried(bad: str) -> None:
    good, packs = written([200_000, 9])
    key = f"{FOLDER}/{packs[0].row.name}"
    first, _ = written([200_000, 9])
    if bad == "damaged":
        first._inner._store.objects[key][150_000] ^= 1  # type: ignore[attr-defined]
    elif bad == "absent":
        first.delete(key)
    elif bad == "short":
        del first._inner._store.objects[key][100_000:]  # type: ignore[attr-defined]
    else:
        first.add(Fault("read_into", error=lambda: Unavailable("away"), times=None))
    target, copied = place(), []
    names = Copying([Source(first), Source(good)], target, FOLDER, Pace(copied=copied.append)).copy(packs, named(packs))
    assert content(target, names[0]) == content(good, names[0])
    assert sum(copied) == packs[0].row.nbytes, "what was for nothing is taken back"


def test_no_source_at_all() -> None:
    _, packs = written([100])
    with pytest.raises(NotFound, match="no such object"):
        Copying([Source(place())], place(), FOLDER).copy(packs, named(packs))


def test_names_may_differ_by_source() -> None:
    source, packs = written([100_000])
    name = packs[0].row.name
    other = place()
    other._inner.open_writer(f"{FOLDER}/elsewhere", 5).abort()
    data = content(source, name)
    writer = other.open_writer(f"{FOLDER}/elsewhere", len(data))
    writer.write_at(0, data)
    writer.finish()
    target = place()
    assert Copying([Source(other, {name: "elsewhere"})], target, FOLDER).copy(packs, named(packs)) == [name]
    assert content(target, name) == data


def test_what_is_whole_already_is_taken_and_what_is_not_gets_another_name() -> None:
    source, packs = written([100_000])
    name = packs[0].row.name
    target = place()
    Copying([Source(source)], target, FOLDER).copy(packs, named(packs))
    before = target.counts["write_at"]
    assert Copying([Source(source)], target, FOLDER).copy(packs, named(packs)) == [name]
    assert target.counts["write_at"] == before
    target._inner._store.objects[f"{FOLDER}/{name}"][50_000] ^= 1  # type: ignore[attr-defined]
    assert Copying([Source(source)], target, FOLDER).copy(packs, named(packs)) == [f"{name}-1"]
    assert content(target, f"{name}-1") == content(source, name)


def test_a_given_name_is_made_free_if_it_is_dead() -> None:
    source, packs = written([100_000])
    name = packs[0].row.name
    target = place()
    target.open_writer(f"{FOLDER}/{name}", 7)  # nobody will finish it
    copying = Copying([Source(source)], target, FOLDER, replaces=True)
    assert copying.copy(packs, lambda position, attempt: name) == [name]
    assert content(target, name) == content(source, name)


def test_a_name_that_stays_taken_ends_in_an_error() -> None:
    source, packs = written([100])
    target = place()
    target.open_writer(f"{FOLDER}/{packs[0].row.name}", 7)
    with pytest.raises(Conflict):
        Copying([Source(source)], target, FOLDER).copy(packs, lambda position, attempt: packs[0].row.name)


def test_failures_of_the_target_are_bounded() -> None:
    source, packs = written([100_000])
    target = place(Fault("finish", error=lambda: Unavailable("lost"), times=None))
    passed: list[BackendError] = []
    with pytest.raises(Unavailable):
        Copying([Source(source)], target, FOLDER, Pace(passing=passed.append)).copy(packs, named(packs))
    assert len(passed) == replicate.ATTEMPTS - 1
    full = place(Fault("open_writer", error=lambda: OutOfSpace("full"), times=None))
    with pytest.raises(OutOfSpace):
        Copying([Source(source)], full, FOLDER).copy(packs, named(packs))
    assert full.counts["open_writer"] == 1


@pytest.mark.parametrize("replaces", [False, True])
def test_whoever_gives_up_is_not_taken_for_a_name_that_is_taken(replaces: bool) -> None:
    """A launch that has been fenced hears so once, in the middle of a copy: it stops, and removes nothing."""
    source, packs = written([200_000])
    told = iter([None, None, Fenced("a newer launch has the run")])

    def give_up() -> None:
        error = next(told, None)
        if error is not None:
            raise error

    target = place()
    with pytest.raises(Fenced):
        Copying([Source(source)], target, FOLDER, Pace(give_up=give_up), replaces=replaces).copy(packs, named(packs))
    assert target.counts["open_writer"] == 1
    assert target.counts["delete"] == 0


def test_what_a_killed_writer_had_not_synced_is_synced_before_it_counts(tmp_path: Path) -> None:
    """Cut to its length, all bytes in the page cache, and then the process was killed: a power cut would take them."""
    source, packs = written([70_000])
    calls = WatchedSyscalls()
    target = PosixBackend(tmp_path, syscalls=calls)
    target.make_folder(FOLDER)
    (name,) = (pack.row.name for pack in packs)
    whole = content(source, name)
    killed = target.open_writer(f"{FOLDER}/{name}", len(whole))
    killed.write_at(0, whole)
    calls.fail("fsync", errno.EIO, nth=len(calls.trace("fsync")) + 1, times=1)
    with pytest.raises(BackendError):
        killed.finish()
    calls.clear()
    assert Copying([Source(source)], target, FOLDER).copy(packs, named(packs)) == [name]
    assert calls.trace("pwrite") == [], "it is whole: no second copy"
    assert calls.trace("fsync") == [("fsync", name), ("fsync", FOLDER)]
