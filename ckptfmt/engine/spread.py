"""From the durable tier to a replica: packs first, then what proves them (spec/tiers.md, "Replicas").

COMMIT.json comes after everything that it speaks of, the hint after COMMIT.json: so a replica opens only what is whole
there. Every step may be repeated.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ckptfmt.engine import protocol, verdicts
from ckptfmt.engine.replicate import Copying, Pace, Source, packs_to_copy
from ckptfmt.engine.site import Site
from ckptfmt.engine.tiers import Tier
from ckptfmt.engine.transfer import run_all
from ckptfmt.errors import NotFound
from ckptfmt.format import layout
from ckptfmt.format.manifest import MANIFEST_BYTES_MAX, Manifest, Shared
from ckptfmt.format.part import PART_BYTES_MAX
from ckptfmt.format.tables import PackRow
from ckptfmt.format.verdict import encode_commit
from ckptfmt.ports.records import GenerationRecord, ReplicaPack

log = logging.getLogger("ckptfmt")

_THREADS = 8
"""That copy small objects: each waits for two round trips."""


def copy_packs(
    row: GenerationRecord, told: Shared, tier: Tier, sources: Sequence[Source], pace: Pace, *, rank: int | None = None
) -> None:
    """The packs of ``told`` (a part or a manifest), or those of one rank, onto ``tier``, under the same names."""
    folder, packs = verdicts.folder_of(row), packs_to_copy(told, rank)
    tier.backend.make_folder(folder)
    Copying(sources, tier.backend, folder, pace, replaces=True).copy(
        packs, lambda position, attempt: packs[position].row.name
    )


def missing_packs(row: GenerationRecord, manifest: Manifest, tier: Tier) -> list[PackRow]:
    """Which packs of the generation's own folder the tier does not hold with their length. One listing."""
    folder = verdicts.folder_of(row)
    there = {info.key: info.nbytes for info in tier.backend.list(folder)}
    own = [pack for pack in manifest.packs if pack.generation is None]
    return [pack for pack in own if there.get(protocol.pack_key(folder, pack)) != pack.nbytes]


def copy_verdict(site: Site, row: GenerationRecord, manifest: Manifest, tier: Tier) -> None:
    """Parts, manifest, COMMIT.json and hint, once all packs are there; the catalog is told."""
    missing = missing_packs(row, manifest, tier)
    if missing or row.manifest_name is None:
        raise NotFound(f"{tier.name} does not hold {len(missing)} packs of generation {row.id}, {missing[:1]} first")
    folder, catalog = verdicts.folder_of(row), site.sql()
    names = [record.part_name for record in catalog.ranks(row.id) if record.part_name is not None]
    _copy_small(site, tier, [f"{folder}/{name}" for name in names], PART_BYTES_MAX)
    _copy_small(site, tier, [f"{folder}/{row.manifest_name}"], MANIFEST_BYTES_MAX)
    packs = [ReplicaPack(pack.generation or row.key, pack.name, pack.name) for pack in manifest.packs]
    catalog.note_replicas(row.id, tier.uuid, packs)
    tier.backend.create(f"{folder}/{layout.COMMIT}", encode_commit(verdicts.commit_of(site, row)))
    tier.backend.make_folder(layout.commits_folder(row.run_key))
    tier.backend.create(layout.commit_hint(row.run_key, row.epoch, row.commit_seq or 0, row.key), b"")
    catalog.mark_replicated(row.id, tier.uuid)


def _copy_small(site: Site, tier: Tier, keys: Sequence[str], limit: int) -> None:
    def copy(key: str) -> None:
        try:
            stored = site.backend.read(key, limit=limit)
        except NotFound:
            if not key.endswith(".part.json"):
                raise
            log.info("%s is not there, and not copied: readers do without", key)
        else:
            tier.backend.create(key, stored)

    run_all([lambda key=key: copy(key) for key in keys], threads=_THREADS, name="ckptfmt-replicate-small")  # type: ignore[misc]
