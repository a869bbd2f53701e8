"""C2: write the packs of a snapshot and make them durable, hashing every chunk on the way."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from ckptfmt.engine.plan import PackPlan, Unit
from ckptfmt.engine.save.snapshot import Snapshot
from ckptfmt.engine.transfer import run_all, thread_count
from ckptfmt.errors import AccessDenied, BackendError, Conflict, OutOfSpace
from ckptfmt.format import checksum, layout
from ckptfmt.ports.backend import Backend, ObjectWriter

log = logging.getLogger("ckptfmt")

ATTEMPTS = 3
"""How often one pack is written: after any error an object is dead and the pack gets a new name."""
_PAUSE_SECONDS = 0.2


@dataclass(frozen=True)
class WrittenPack:
    name: str
    nbytes: int
    header_bytes: int
    header_digest: str


@dataclass(frozen=True)
class Written:
    """What one rank wrote. ``digests`` holds, per leaf of the plan, the digests of its chunks in order."""

    packs: tuple[WrittenPack, ...]
    digests: list[list[bytes]]
    seconds: float
    retries: int


def check_space(backend: Backend, snapshot: Snapshot) -> None:
    """Raise ``OutOfSpace`` before the first byte is written if the packs cannot fit."""
    needed = sum(pack.nbytes for pack in snapshot.plan.packs)
    free = backend.space()
    if free is not None and needed > free:
        raise OutOfSpace(
            f"{backend.url}: the save needs {needed} bytes but only {free} are free; nothing was written; "
            "free space there (see `ckptfmt gc`)",
            needed=needed,
            free=free,
        )


def write_packs(
    backend: Backend, folder: str, rank: int, snapshot: Snapshot, *, give_up: Callable[[], None]
) -> Written:
    """Write all packs into ``folder``. ``give_up`` is asked between units; it raises to stop the work."""
    began = time.perf_counter()
    sizes = [spec.nbytes for _, spec in snapshot.names_and_specs]
    digests = [[b""] * checksum.chunk_count(nbytes) for nbytes in sizes]
    packs: list[WrittenPack] = []
    retries = 0
    for index, planned in enumerate(snapshot.plan.packs):
        for attempt in range(ATTEMPTS):
            name = layout.pack_name(rank, index, attempt)
            try:
                _write_pack(backend, f"{folder}/{name}", index, planned, snapshot, digests, give_up)
            except BackendError as error:
                if attempt + 1 == ATTEMPTS or isinstance(error, OutOfSpace | AccessDenied) or not error.transient:
                    raise
                log.warning("%s; writing the pack again under a new name", error)
                retries += 1
                time.sleep(_PAUSE_SECONDS * (attempt + 1))
            except Conflict:
                # An earlier attempt whose answer was lost left an object of this name: never write over it.
                if attempt + 1 == ATTEMPTS:
                    raise
                retries += 1
            else:
                packs.append(WrittenPack(name, planned.nbytes, len(planned.header), planned.header_digest))
                break
    return Written(tuple(packs), digests, time.perf_counter() - began, retries)


def _write_pack(
    backend: Backend,
    key: str,
    index: int,
    planned: PackPlan,
    snapshot: Snapshot,
    digests: list[list[bytes]],
    give_up: Callable[[], None],
) -> None:
    image = snapshot.image(index)
    first_offset = dict(zip(planned.leaves, planned.offsets, strict=True))
    writer = backend.open_writer(key, planned.nbytes)
    try:

        def write(unit: Unit) -> None:
            give_up()
            snapshot.wait_for(unit)
            for chunk in unit.chunks:
                number = (chunk.offset - first_offset[chunk.leaf]) // checksum.CHUNK_BYTES
                digests[chunk.leaf][number] = checksum.digest(image[chunk.offset : chunk.offset + chunk.nbytes])
            if unit.stop > unit.start:
                writer.write_at(unit.start, image[unit.start : unit.stop])

        run_all(
            [lambda unit=unit: write(unit) for unit in planned.units],  # type: ignore[misc]
            threads=thread_count(),
            name="ckptfmt-write",
        )
        give_up()
        writer.finish()
    except BaseException:
        _abort(writer, key)
        raise


def _abort(writer: ObjectWriter, key: str) -> None:
    try:
        writer.abort()
    except BackendError as error:  # the first error is the one to report; gc removes what is left
        log.warning("%s could not be removed after a failed write: %s", key, error)
