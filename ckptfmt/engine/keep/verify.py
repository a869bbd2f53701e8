"""``verify``: read every byte of a generation and compare it with its digest. Finds all damage, not the first."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ckptfmt.engine.arena import map_memory
from ckptfmt.engine.opened import Opened
from ckptfmt.engine.plan import align_up
from ckptfmt.engine.read import ReadUnit, Region, check_chunk, plan_reads, read_units
from ckptfmt.engine.reports import Problem, VerifyReport
from ckptfmt.engine.transfer import IO_THREADS, run_all
from ckptfmt.errors import BackendError, Corrupt, FormatError, NotFound
from ckptfmt.format import checksum, pack
from ckptfmt.format.tables import PackRow

Progress = Callable[[int, int], None]
"""(bytes done, bytes in all); called from worker threads."""


def verify(opened: Opened, progress: Progress | None = None) -> VerifyReport:
    """Check pack headers and every chunk. The report lists every problem with object, tensor and offset."""
    began = time.perf_counter()
    plan = plan_reads(box for tensor in opened.stored.all for box in tensor.boxes)
    problems: list[Problem] = []
    damaged: set[str] = set()
    for row in opened.manifest.packs:
        found = _check_header(opened, row)
        if found is not None:
            problems.append(found)
            damaged.add(found.object)
    work = [(region, unit) for region in plan.regions for unit in read_units(region)]
    chunks = sum(len(unit.chunks) for _, unit in work)
    done = [0]

    def scan(share: Sequence[tuple[Region, ReadUnit]]) -> None:
        window = map_memory(max((align_up(unit.stop - unit.start) for _, unit in share), default=1))
        for region, unit in share:
            problems.extend(_check_unit(opened, region, unit, window[: unit.stop - unit.start]))
            done[0] += sum(nbytes for *_, nbytes in unit.chunks)
            if progress is not None:
                progress(done[0], plan.wanted_bytes)

    workers = max(1, min(IO_THREADS, len(work)))
    shares = [work[number::workers] for number in range(workers)]
    run_all([lambda share=share: scan(share) for share in shares], threads=workers, name="ckptfmt-verify")  # type: ignore[misc]
    problems.sort(key=lambda item: (item.object, item.offset or 0))
    return VerifyReport(
        generation_id=opened.info.id,
        run=opened.info.run,
        step=opened.info.step,
        nbytes=plan.wanted_bytes,
        chunks=chunks,
        seconds=time.perf_counter() - began,
        problems=tuple(problems),
    )


def _check_unit(opened: Opened, region: Region, unit: ReadUnit, window: memoryview) -> list[Problem]:
    try:
        opened.site.backend.read_into(region.pack, unit.start, window)
    except (BackendError, Corrupt, NotFound) as error:
        tensor = unit.chunks[0][0].tensor
        return [Problem(error.kind, region.pack, str(error), tensor=tensor, offset=unit.start)]
    problems = []
    for box, number, offset, nbytes in unit.chunks:
        try:
            check_chunk(box, number, offset, window[offset - unit.start : offset - unit.start + nbytes])
        except Corrupt as error:
            problems.append(Problem(error.kind, region.pack, str(error), tensor=box.tensor, offset=offset))
    return problems


def _check_header(opened: Opened, row: PackRow) -> Problem | None:
    """The header's bytes against their digest, and as a header."""
    key = opened.pack_key(row.name, row.generation)
    head = bytearray(row.header_bytes)
    try:
        opened.site.backend.read_into(key, 0, memoryview(head))
        if checksum.hex_digest(head) != row.header_digest:
            raise Corrupt(
                f"the header of {key} hashes to {checksum.hex_digest(head)}, recorded is {row.header_digest}",
                object=key,
                offset=0,
            )
        pack.parse_header(bytes(head), row.nbytes)
    except (FormatError, BackendError, NotFound) as error:
        return Problem(error.kind, key, str(error), offset=0)
    return None
