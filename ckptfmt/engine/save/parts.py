"""The part: the list of what one rank wrote, built from its snapshot and the digests taken while writing."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ckptfmt.__about__ import __version__
from ckptfmt.engine.plan import SavePlan
from ckptfmt.engine.save.context import Ranks
from ckptfmt.engine.save.owners import stored_kinds
from ckptfmt.engine.save.persist import Written
from ckptfmt.engine.save.snapshot import Snapshot
from ckptfmt.format import checksum
from ckptfmt.format.manifest import Writer
from ckptfmt.format.part import Part
from ckptfmt.format.tables import BoxTable, ClaimTable, PackRow, TensorTable
from ckptfmt.ports.arrays import LeafSpec

Named = Sequence[tuple[str, LeafSpec]]


def make_part(
    snapshot: Snapshot,
    written: Written,
    *,
    key: str,
    step: int,
    launch_digest: str,
    save_number: int,
    ranks: Ranks,
    created_at: str,
) -> Part:
    """Return the part of ``ranks.rank``. Tensors and boxes stand in the order of the frozen leaves."""
    leaves, plan = snapshot.names_and_specs, snapshot.plan
    firsts, row_of = _rows(leaves)
    packs = [
        PackRow(
            name=pack.name,
            rank=ranks.rank,
            nbytes=pack.nbytes,
            header_bytes=pack.header_bytes,
            header_digest=pack.header_digest,
        )
        for pack in written.packs
    ]
    return Part(
        key=key,
        step=step,
        launch=launch_digest,
        save_number=save_number,
        created_at=created_at,
        writer=Writer(library="ckptfmt", version=__version__),
        chunk_bytes=checksum.CHUNK_BYTES,
        packs=packs,
        tensors=_tensors([leaves[index] for index in firsts], ranks),
        boxes=_boxes(leaves, row_of, plan, written),
        aliases=snapshot.aliases,
        metadata=snapshot.metadata,
        rank=ranks.rank,
        world_size=ranks.world_size,
        mesh=snapshot.mesh or None,
        replica_check="off" if ranks.replica_check == "off" else msgspec.UNSET,
        claims=_claims(leaves, row_of, plan, written),
        tree=snapshot.common,
        per_rank=snapshot.per_rank,
    )


def _rows(leaves: Named) -> tuple[Sequence[int], Sequence[int]]:
    """Return the first leaf of each tensor, and the tensor of each leaf; leaves of one tensor stand side by side."""
    names = [name for name, _ in leaves]
    if len(set(names)) == len(names):
        return range(len(names)), range(len(names))
    firsts: list[int] = []
    row_of: list[int] = []
    for index, name in enumerate(names):
        if not index or name != names[index - 1]:
            firsts.append(index)
        row_of.append(len(firsts) - 1)
    return firsts, row_of


def _tensors(leaves: Named, ranks: Ranks) -> TensorTable:
    return TensorTable(
        name=[name for name, _ in leaves],
        kind=stored_kinds([spec for _, spec in leaves], ranks),
        rank=[ranks.rank if spec.kind == "per_rank" else -1 for _, spec in leaves],
        dtype=[spec.dtype for _, spec in leaves],
        shape=[spec.global_shape for _, spec in leaves],
    )


def _boxes(leaves: Named, row_of: Sequence[int], plan: SavePlan, written: Written) -> BoxTable:
    pack_of = [0] * len(leaves)
    offset_of = [0] * len(leaves)
    for number, planned in enumerate([planned for planned in plan.packs if not planned.claims]):
        for leaf, offset in zip(planned.leaves, planned.offsets, strict=True):
            pack_of[leaf], offset_of[leaf] = number, offset
    others = plan.roles.claims | plan.roles.bare
    mine: Sequence[int] = [leaf for leaf in range(len(leaves)) if leaf not in others] if others else range(len(leaves))
    return BoxTable(
        tensor=[row_of[leaf] for leaf in mine],
        start=[leaves[leaf][1].start for leaf in mine],
        size=[leaves[leaf][1].size for leaf in mine],
        pack=[pack_of[leaf] for leaf in mine],
        offset=[offset_of[leaf] for leaf in mine],
        digests=[b"".join(written.digests[leaf]).hex() for leaf in mine],
    )


def _claims(leaves: Named, row_of: Sequence[int], plan: SavePlan, written: Written) -> ClaimTable:
    claims = sorted(plan.roles.claims)
    return ClaimTable(
        tensor=[row_of[leaf] for leaf in claims],
        start=[leaves[leaf][1].start for leaf in claims],
        size=[leaves[leaf][1].size for leaf in claims],
        digests=[b"".join(written.digests[leaf]).hex() for leaf in claims],
    )
