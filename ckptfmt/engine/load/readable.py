"""Whether all of a generation can be read, before the first byte of it goes where it cannot be taken back."""

from __future__ import annotations

from collections.abc import Sequence

from ckptfmt.engine.arena import PAGE, map_memory
from ckptfmt.engine.opened import Opened
from ckptfmt.engine.read_plan import ReadUnit, plan_reads, read_units
from ckptfmt.engine.transfer import run_all
from ckptfmt.engine.units import align_up


def require_readable(opened: Opened) -> None:
    """Read every chunk from where it is whole; ``Corrupt``, ``NotFound`` or ``BackendError`` if one is nowhere."""
    plan = plan_reads(box for tensor in opened.stored.all for box in tensor.boxes)
    work = [(region.pack, unit) for region in plan.regions for unit in read_units(region)]
    if not work:
        return

    def read(share: Sequence[tuple[str, ReadUnit]]) -> None:
        window = map_memory(max(align_up(unit.stop - unit.start) for _, unit in share) + PAGE)
        for pack, unit in share:
            at = unit.start % PAGE  # as aligned as in the file
            opened.nearest.fill(pack, unit.start, window[at : at + unit.stop - unit.start], unit.chunks)

    threads = min(opened.nearest.threads({pack for pack, _ in work}), len(work))
    shares = [work[number::threads] for number in range(threads)]
    with opened.noting_damage():
        run_all([lambda share=share: read(share) for share in shares], threads=threads, name="ckptfmt-read")  # type: ignore[misc]
