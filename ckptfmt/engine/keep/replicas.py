"""Bringing committed generations whole onto a replica, and saying what it lacks (spec/tiers.md, "Replicas")."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from ckptfmt.engine import protocol, spread, verdicts
from ckptfmt.engine.keep.pieces import Pieces
from ckptfmt.engine.opened import Opened, read_manifest
from ckptfmt.engine.packs import PackToCopy, packs_to_copy
from ckptfmt.engine.repairs import repairs_in
from ckptfmt.engine.replicate import Copying, Pace, Source
from ckptfmt.engine.tiers import Tier
from ckptfmt.errors import BackendError, Corrupt, NotFound
from ckptfmt.ports.backend import Backend
from ckptfmt.ports.records import GenerationRecord, ReplicaPack


def sources_for(opened: Opened, target: Tier) -> list[Source]:
    """Where packs may be copied from, nearest first: other tiers, their repairs, and in the end all tiers together."""
    sources = []
    for tier in opened.nearest.tiers:
        if tier.uuid != target.uuid:
            sources.append(Source(tier.backend))
            try:
                repairs = repairs_in(tier.backend, opened.folder)
            except BackendError:
                continue  # copying from it tells why
            if repairs:
                sources.append(Source(tier.backend, {name: new[-1] for name, new in repairs.items()}))
    return [*sources, Source(cast(Backend, Pieces(opened)))]


def replicate(opened: Opened, row: GenerationRecord, target: Tier, pace: Pace) -> None:
    """Bring a generation whole onto ``target``: packs, then what proves them; the catalog says so. May be repeated
    after any crash: what is there already is compared.

    ``Corrupt`` if no place has a pack whole, or if what the replica has long since is damaged: that is for a repair.
    ``NotFound`` if it refers to packs of another generation that the replica lacks, or is not proven yet.
    """
    site, backend, folder = opened.site, target.backend, opened.folder
    if row.proven_at is None:
        raise NotFound(f"{opened.name} is not proven yet: `ckptfmt recover` does it", kind="object_missing")
    packs = packs_to_copy(opened.manifest)
    others = [pack for pack in opened.manifest.packs if pack.generation is not None]
    protocol.raise_faults(protocol.pack_faults(backend, folder, opened.manifest, others))
    copying = Copying(sources_for(opened, target), backend, folder, pace, replaces=True)
    if verdicts.read_commit(backend, folder) is None:
        backend.make_folder(folder)
        copying.copy(packs, lambda position, attempt: packs[position].row.name)
        _require_manifest(opened, row)
        spread.copy_verdict(site, row, opened.manifest, target)
        return
    names = [_held_as(copying, target, pack, row) for pack in packs]
    protocol.create_hint(replace(site, backend=backend), row.run_key, row.key, epoch=row.epoch, seq=row.commit_seq or 0)
    noted = [ReplicaPack(row.key, pack.row.name, name) for pack, name in zip(packs, names, strict=True)]
    noted += [ReplicaPack(pack.generation or row.key, pack.name, pack.name) for pack in others]
    site.sql().note_replicas(row.id, target.uuid, noted)
    site.sql().mark_replicated(row.id, target.uuid)


def _require_manifest(opened: Opened, row: GenerationRecord) -> None:
    """What is copied from the durable tier is what the generation was opened by, perhaps from elsewhere."""
    if row.manifest_name is not None and row.manifest_digest is not None:
        read_manifest(opened.site, opened.folder, row.manifest_name, row.manifest_digest, row.key)


def _held_as(copying: Copying, target: Tier, pack: PackToCopy, row: GenerationRecord) -> str:
    """The name of the object that has a pack's bytes where a verdict says that the generation is whole."""
    repairs = repairs_in(target.backend, copying.folder).get(pack.row.name, ())
    for name in (pack.row.name, *repairs):
        if copying.holds(pack, name):
            target.backend.sync(f"{copying.folder}/{name}")
            return name
    key = f"{copying.folder}/{pack.row.name}"
    raise Corrupt(
        f"{target.name}: {key} is damaged or gone; `ckptfmt replicate --repair URL#{row.run}@{row.id}` writes its "
        "bytes beside it",
        object=key,
    )
