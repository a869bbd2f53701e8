"""The part: the list of what one rank wrote, built from its snapshot and the digests taken while writing."""

from __future__ import annotations

from ckptfmt.__about__ import __version__
from ckptfmt.engine.save.persist import Written
from ckptfmt.engine.save.snapshot import Snapshot
from ckptfmt.format import checksum
from ckptfmt.format.manifest import Writer
from ckptfmt.format.part import Part
from ckptfmt.format.tables import BoxTable, PackRow, TensorTable


def make_part(
    snapshot: Snapshot,
    written: Written,
    *,
    key: str,
    step: int,
    launch_digest: str,
    save_number: int,
    rank: int,
    world_size: int,
    created_at: str,
) -> Part:
    """Return the part of ``rank``. Tensors stand in the order of the frozen leaves, one box each."""
    tensors, boxes = _tables(snapshot, written, rank)
    packs = [
        PackRow(
            name=pack.name,
            rank=rank,
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
        tensors=tensors,
        boxes=boxes,
        aliases=snapshot.aliases,
        metadata=snapshot.metadata,
        rank=rank,
        world_size=world_size,
        tree=snapshot.common,
        per_rank=snapshot.per_rank,
    )


def _tables(snapshot: Snapshot, written: Written, rank: int) -> tuple[TensorTable, BoxTable]:
    leaves = snapshot.names_and_specs
    pack_of = [0] * len(leaves)
    offset_of = [0] * len(leaves)
    for number, planned in enumerate(snapshot.plan.packs):
        for leaf, offset in zip(planned.leaves, planned.offsets, strict=True):
            pack_of[leaf], offset_of[leaf] = number, offset
    tensors = TensorTable(
        name=[name for name, _ in leaves],
        kind=[spec.kind for _, spec in leaves],
        rank=[rank if spec.kind == "per_rank" else -1 for _, spec in leaves],
        dtype=[spec.dtype for _, spec in leaves],
        shape=[spec.global_shape for _, spec in leaves],
    )
    boxes = BoxTable(
        tensor=list(range(len(leaves))),
        start=[spec.start for _, spec in leaves],
        size=[spec.size for _, spec in leaves],
        pack=pack_of,
        offset=offset_of,
        digests=[b"".join(chunks).hex() for chunks in written.digests],
    )
    return tensors, boxes
