"""From the durable tier to a replica: packs first, then what proves them (spec/tiers.md, "Replicas").

COMMIT.json comes after everything that it speaks of, the hint after COMMIT.json: so a replica opens only what is whole
there. Every step may be repeated.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from ckptfmt.engine import protocol, verdicts
from ckptfmt.engine.packs import packs_to_copy
from ckptfmt.engine.replicate import Copying, Pace, Source
from ckptfmt.engine.rereading import read_whole
from ckptfmt.engine.site import Site
from ckptfmt.engine.tiers import Tier
from ckptfmt.engine.transfer import run_all
from ckptfmt.errors import Corrupt, NotFound
from ckptfmt.format import layout
from ckptfmt.format.manifest import MANIFEST_BYTES_MAX, Manifest, Shared, manifest_digest
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
    """Parts, manifest, COMMIT.json and hint, once all packs are there; the catalog is told.

    To be called once whoever copied the packs has said that it compared them: here only their lengths are.
    """
    missing = missing_packs(row, manifest, tier)
    if missing or row.manifest_name is None or row.manifest_digest is None:
        raise NotFound(f"{tier.name} does not hold {len(missing)} packs of generation {row.id}, {missing[:1]} first")
    folder, catalog = verdicts.folder_of(row), site.sql()
    parts = {f"{folder}/{rank.part_name}": rank.part_digest for rank in catalog.ranks(row.id) if rank.part_name}
    _copy_parts(site, tier, parts)
    _copy_small(site, tier, f"{folder}/{row.manifest_name}", row.manifest_digest, MANIFEST_BYTES_MAX)
    packs = [ReplicaPack(pack.generation or row.key, pack.name, pack.name) for pack in manifest.packs]
    catalog.note_replicas(row.id, tier.uuid, packs)
    tier.backend.create(f"{folder}/{layout.COMMIT}", encode_commit(verdicts.commit_of(site, row)))
    tier.backend.make_folder(layout.commits_folder(row.run_key))
    tier.backend.create(layout.commit_hint(row.run_key, row.epoch, row.commit_seq or 0, row.key), b"")
    catalog.mark_replicated(row.id, tier.uuid)


def _copy_parts(site: Site, tier: Tier, digests: Mapping[str, str | None]) -> None:
    """By key, as far as they are whole. The manifest tells all that readers need."""

    def copy(key: str, digest: str | None) -> None:
        try:
            _copy_small(site, tier, key, digest, PART_BYTES_MAX)
        except (NotFound, Corrupt) as error:
            log.info("%s is not copied, readers do without: %s", key, error)

    tasks = [lambda key=key, digest=digest: copy(key, digest) for key, digest in digests.items()]
    run_all(tasks, threads=_THREADS, name="ckptfmt-replicate-small")


def _copy_small(site: Site, tier: Tier, key: str, digest: str | None, limit: int) -> None:
    """``Corrupt`` unless what was read has this digest, which the catalog knows."""

    def read() -> bytes:
        stored = site.backend.read(key, limit=limit)
        found = manifest_digest(stored)
        if found != digest:
            raise Corrupt(f"{site.backend.url}: {key} hashes to {found}, recorded is {digest}", object=key)
        return stored

    tier.backend.create(key, read_whole(read))
