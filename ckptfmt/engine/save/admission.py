"""Whether a save may take so many bytes: asked in C1, before anything is written (spec/tiers.md, "Bounds")."""

from __future__ import annotations

from math import prod

from ckptfmt.engine.save.context import LaunchContext, Ranks
from ckptfmt.engine.save.patience import Patience
from ckptfmt.engine.save.persist import packs_bytes
from ckptfmt.engine.save.snapshot import Snapshot
from ckptfmt.errors import OutOfSpace
from ckptfmt.format.dtypes import dtype
from ckptfmt.ports.records import GenerationRecord

QUOTA = "quota"
"""Kind of ``OutOfSpace`` that says: there is a limit, and it is not the storage's."""


def admit(context: LaunchContext, row: GenerationRecord, snapshot: Snapshot, patience: Patience) -> None:
    """Raise ``OutOfSpace`` of the kind ``quota`` if this save would pass a limit.

    What is to be written is told first and summed up afterwards: of two saves that begin together both see the other.
    Where the coordinator asks the catalog for all ranks it tells what all of them write, as far as it knows.
    """
    limits = [(context.site.bytes_max, None), (context.bytes_max, context.run.name)]
    if all(limit is None for limit, _ in limits) or (
        context.coordination.asks_for_all and not context.ranks.is_coordinator
    ):
        return
    catalog, rank = context.site.sql(), context.ranks.rank
    needed = generation_bytes(snapshot, context.ranks) if context.coordination.asks_for_all else packs_bytes(snapshot)
    patience.repeat(lambda: catalog.report_rank(row.id, rank, state="writing", nbytes=needed))
    for limit, run in limits:
        if limit is None:
            continue
        held = patience.repeat(lambda run=run: catalog.bytes_held(run))  # type: ignore[misc]
        if held > limit:
            patience.repeat(lambda: catalog.report_rank(row.id, rank, state="writing", nbytes=0))
            whose = "the repository" if run is None else f"run {run!r}"
            raise OutOfSpace(
                f"{whose} may hold {limit} bytes (bytes_max); its generations have {held - needed}, this save needs "
                f"{needed} more: nothing was written; retire some and run `ckptfmt gc`, or raise bytes_max",
                needed=needed,
                free=max(0, limit - (held - needed)),
                kind=QUOTA,
            )


def generation_bytes(snapshot: Snapshot, ranks: Ranks) -> int:
    """Of all ranks together, of what this one knows: each tensor whole, and what is of each rank as often."""
    whole: dict[str, int] = {}
    own = 0
    for name, spec in snapshot.names_and_specs:
        if spec.kind == "per_rank":
            own += spec.nbytes
        else:
            whole[name] = prod(spec.global_shape) * dtype(spec.dtype).itemsize
    return sum(whole.values()) + own * len(ranks.members)
