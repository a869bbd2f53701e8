"""C2: write the packs of a snapshot and make them durable, hashing every chunk on the way."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ckptfmt.engine.plan import PackPlan
from ckptfmt.engine.save.snapshot import Snapshot
from ckptfmt.engine.transfer import distant_thread_count, run_all, thread_count
from ckptfmt.engine.units import Unit, joined
from ckptfmt.errors import AccessDenied, BackendError, Conflict, OutOfSpace
from ckptfmt.format import checksum, layout
from ckptfmt.ports.backend import Backend, ObjectWriter, Traits

log = logging.getLogger("ckptfmt")

ATTEMPTS = 3
"""How often one pack is written: after any error an object is dead and the pack gets a new name."""
_PAUSE_SECONDS = 0.2
_WRITE_BYTES = 32 << 20
"""Most that is sent in one request without being asked for: each costs the interpreter's lock a millisecond or more."""
_WRITES_EACH = 4
"""Requests for each thread, at least: the last ones leave threads idle."""
_PASSING_MAX = 6
"""Units under way of what is not held whole, but is put together on the way: each takes memory for two parts."""


@dataclass(frozen=True)
class WrittenPack:
    name: str
    nbytes: int
    header_bytes: int
    header_digest: str


@dataclass(frozen=True)
class Written:
    """What one rank wrote. ``digests`` holds, per leaf of the plan, the digests of its chunks in order; empty byte
    strings for what it neither wrote nor compares."""

    packs: tuple[WrittenPack, ...]
    digests: list[list[bytes]]
    seconds: float
    retries: int


def packs_bytes(snapshot: Snapshot) -> int:
    """Bytes of the packs that this rank writes."""
    return sum(pack.nbytes for pack in snapshot.plan.packs if not pack.claims)


def check_space(backend: Backend, snapshot: Snapshot) -> None:
    """Raise ``OutOfSpace`` before the first byte is written if the packs cannot fit."""
    needed = packs_bytes(snapshot)
    free = backend.space()
    if free is not None and needed > free:
        raise OutOfSpace(
            f"{backend.url}: the save needs {needed} bytes but only {free} are free; nothing was written; "
            "free space there (see `ckptfmt gc`)",
            needed=needed,
            free=free,
        )


def write_packs(
    backend: Backend,
    folder: str,
    rank: int,
    snapshot: Snapshot,
    *,
    give_up: Callable[[], None],
    passing: Callable[[BackendError], None],
    begins: Callable[[str], object] = lambda name: None,
    elsewhere: bool = False,
) -> Written:
    """Write all packs into ``folder``, and take the digests of what other ranks write.

    ``give_up`` is asked between units; it raises to stop the work. ``passing`` is told each error after which a pack is
    written again, and ``begins`` the name of each pack that is begun. After an error nothing more of the snapshot is
    written: it is dropped, unless there is somewhere ``elsewhere`` that it may be written to.
    """
    began = time.perf_counter()
    digests = [[b""] * checksum.chunk_count(spec.nbytes, checksum.CHUNK_BYTES) for _, spec in snapshot.names_and_specs]
    for leaf, known in snapshot.digests.items():
        digests[leaf] = known
    packs: list[WrittenPack] = []
    retries = 0
    try:
        for planned in snapshot.plan.packs:
            if planned.claims:
                _hash(planned, snapshot, digests, give_up)
                continue
            name, attempts = _write_pack(
                backend, folder, rank, len(packs), planned, snapshot, digests, give_up, passing, begins
            )
            packs.append(WrittenPack(name, planned.nbytes, len(planned.header), planned.header_digest))
            retries += attempts - 1
    except BaseException as error:
        if not elsewhere:
            snapshot.drop(error)
        raise
    return Written(tuple(packs), digests, time.perf_counter() - began, retries)


def _hash(planned: PackPlan, snapshot: Snapshot, digests: list[list[bytes]], give_up: Callable[[], None]) -> None:
    """Take the digests of what another rank writes."""

    def hash_unit(unit: Unit) -> None:
        with snapshot.lend(unit) as image:
            give_up()
            _digest(unit, image, digests)

    run_all(
        [lambda unit=unit: hash_unit(unit) for unit in planned.units],  # type: ignore[misc]
        threads=thread_count(),
        name="ckptfmt-hash",
    )


def _digest(unit: Unit, image: memoryview, digests: list[list[bytes]]) -> None:
    for chunk in unit.chunks:
        at = chunk.offset - unit.start
        digests[chunk.leaf][chunk.number] = checksum.digest(image[at : at + chunk.nbytes])


def _write_pack(
    backend: Backend,
    folder: str,
    rank: int,
    index: int,
    planned: PackPlan,
    snapshot: Snapshot,
    digests: list[list[bytes]],
    give_up: Callable[[], None],
    passing: Callable[[BackendError], None],
    begins: Callable[[str], object],
) -> tuple[str, int]:
    """Write one pack, under a new name after an error that may pass; returns its name and the number of attempts."""
    for attempt in range(ATTEMPTS):
        name = layout.pack_name(rank, index, attempt)
        begins(name)
        try:
            _write_object(backend, f"{folder}/{name}", planned, snapshot, digests, give_up)
        except BackendError as error:
            if attempt + 1 == ATTEMPTS or isinstance(error, OutOfSpace | AccessDenied) or not error.transient:
                raise
            if not snapshot.rewind(planned):
                raise BackendError(
                    f"{error}; the pack cannot be written again, since its bytes are no longer in host memory "
                    "(sync=, or host_bytes_max below the state): save again, or raise host_bytes_max"
                ) from error
            log.warning("%s; writing the pack again under a new name", error)
            passing(error)
            time.sleep(_PAUSE_SECONDS * (attempt + 1))
        except Conflict:
            # An earlier attempt whose answer was lost left an object of this name: never write over it.
            if attempt + 1 == ATTEMPTS or not snapshot.rewind(planned):
                raise
        else:
            return name, attempt + 1
    raise AssertionError("the last attempt neither succeeded nor raised")


def _write_object(
    backend: Backend,
    key: str,
    planned: PackPlan,
    snapshot: Snapshot,
    digests: list[list[bytes]],
    give_up: Callable[[], None],
) -> None:
    units, write_bytes, threads = _shared_out(planned, backend.traits)
    writer = backend.open_writer(key, planned.nbytes, write_bytes=write_bytes)
    try:

        def write(unit: Unit) -> None:
            with snapshot.lend(unit) as image:
                give_up()
                _digest(unit, image, digests)
                writer.write_at(unit.start, image[: unit.stop - unit.start])

        run_all([lambda unit=unit: write(unit) for unit in units], threads=threads, name="ckptfmt-write")  # type: ignore[misc]
        give_up()
        writer.finish()
    except BaseException:
        _abort(writer, key)
        raise


def _shared_out(planned: PackPlan, traits: Traits) -> tuple[Sequence[Unit], int, int]:
    """What is written at once; the bytes of each but the last, or 0 where they differ; and how many threads write."""
    if not traits.distant:
        return planned.units, 0, thread_count()
    threads = distant_thread_count()
    if planned.arena_offset is None:
        return planned.units, 0, min(threads, _PASSING_MAX)
    if not traits.write_bytes:
        return planned.units, 0, threads
    large = min(_WRITE_BYTES, planned.nbytes // (threads * _WRITES_EACH))
    large = 1 << large.bit_length() >> 1  # a power of two: readers' requests end at some of those, too (engine/spans)
    units = joined(planned.units, max(large, traits.write_bytes))
    return units, units[0].stop, threads


def _abort(writer: ObjectWriter, key: str) -> None:
    try:
        writer.abort()
    except BackendError as error:  # the first error is the one to report; gc removes what is left
        log.warning("%s could not be removed after a failed write: %s", key, error)
