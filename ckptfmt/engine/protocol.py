"""C3, C4 and C5 of the commit protocol (spec/commit-protocol.md).

A save finishes itself through these steps, and a takeover or recover finishes what an older launch left
through the very same ones. Each may be repeated after a crash or a lost answer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from ckptfmt.engine import verdicts
from ckptfmt.engine.site import Site
from ckptfmt.errors import BackendError, CatalogError, Corrupt, NotFound, SaveFailed
from ckptfmt.format import layout, verdict
from ckptfmt.format.manifest import Manifest, encode_manifest, manifest_digest
from ckptfmt.format.merge import merge_parts
from ckptfmt.format.part import PART_BYTES_MAX, Part, decode_part
from ckptfmt.ports.catalog import DurableFacts, GenerationRecord, PackRecord, RankRecord

log = logging.getLogger("ckptfmt")

T = TypeVar("T")
_PROOF_ATTEMPTS = 4


def read_parts(site: Site, row: GenerationRecord, ranks: Sequence[RankRecord]) -> list[Part]:
    """Read every rank's part and compare it with the digest that the rank acknowledged."""
    folder = verdicts.folder_of(row)
    parts: list[Part] = []
    for rank in sorted(ranks, key=lambda record: record.rank):
        if rank.part_name is None or rank.part_digest is None:
            raise SaveFailed(
                f"generation {row.id}: rank {rank.rank} has not acknowledged its part",
                stage="merge",
                rank=rank.rank,
                key=row.key,
                generation_id=row.id,
            )
        key = f"{folder}/{rank.part_name}"
        stored = site.backend.read(key, limit=PART_BYTES_MAX)
        if manifest_digest(stored) != rank.part_digest:
            raise Corrupt(
                f"{site.backend.url}: {key} differs from the part that rank {rank.rank} acknowledged "
                f"(generation {row.id})",
                object=key,
            )
        parts.append(decode_part(stored))
    return parts


def check_packs(site: Site, folder: str, manifest: Manifest) -> None:
    """Every pack that the manifest names is there with its length. Lists every one that is not."""
    for pack in manifest.packs:
        place = folder if pack.generation is None else f"{folder.rpartition('/')[0]}/{pack.generation}"
        key = f"{place}/{pack.name}" if place else pack.name
        try:
            found = site.backend.head(key).nbytes
        except NotFound as error:
            raise NotFound(
                f"{site.backend.url}: pack {key} of generation {manifest.id} (run {manifest.run!r}) is not there; "
                "restore an older generation with at=..., or put the object back from a copy",
                kind="object_missing",
            ) from error
        if found != pack.nbytes:
            raise Corrupt(
                f"{site.backend.url}: pack {key} of generation {manifest.id} has {found} bytes, recorded are "
                f"{pack.nbytes}; restore an older generation with at=..., or put the object back from a copy",
                object=key,
            )


def merge(site: Site, row: GenerationRecord, *, parent: str | None, fence: int) -> GenerationRecord:
    """C3: from every rank's part to the manifest on storage and the row ``durable``."""
    catalog = site.sql()
    parts = read_parts(site, row, catalog.ranks(row.id))
    manifest = merge_parts(parts, id=row.id, parent=parent, repository=site.repository, run=row.run)
    folder = verdicts.folder_of(row)
    check_packs(site, folder, manifest)
    stored = encode_manifest(manifest)
    digest = manifest_digest(stored)
    name = layout.manifest_name(digest)
    site.backend.create(f"{folder}/{name}", stored)
    return catalog.mark_durable(row.id, durable_facts(manifest, row.key, name, digest, len(stored)), fence=fence)


def durable_facts(manifest: Manifest, key: str, name: str, digest: str, nbytes: int) -> DurableFacts:
    return DurableFacts(
        manifest_name=name,
        manifest_digest=digest,
        manifest_bytes=nbytes,
        nbytes=manifest.nbytes,
        parent_key=manifest.parent,
        packs=tuple(
            PackRecord(
                generation_key=key if pack.generation is None else pack.generation,
                name=pack.name,
                rank=pack.rank,
                nbytes=pack.nbytes,
                header_digest=pack.header_digest,
            )
            for pack in manifest.packs
        ),
    )


def commit(site: Site, row: GenerationRecord, *, fence: int, until: float) -> GenerationRecord:
    """C4, the commit point. A doubtful answer is resolved by repeating the compare-and-swap, until ``until``
    (``time.monotonic``)."""
    return repeat_sql(lambda: site.sql().commit(row.id, fence=fence), until=until)


def prove(site: Site, row: GenerationRecord) -> GenerationRecord:
    """C5: COMMIT.json and the hint that lets a listing find it; then the row says so.

    If storage keeps refusing, the row is returned unproven: it is committed, and recover finishes it.
    """
    folder = verdicts.folder_of(row)
    if row.commit_seq is None:
        raise AssertionError(f"generation {row.id} has no commit_seq")
    record = verdict.encode_commit(verdicts.commit_of(site, row))
    for attempt in range(_PROOF_ATTEMPTS):
        try:
            site.backend.create(f"{folder}/{layout.COMMIT}", record)
            site.backend.make_folder(layout.commits_folder(row.run_key))
            site.backend.create(layout.commit_hint(row.run_key, row.epoch, row.commit_seq, row.key), b"")
            return site.sql().set_proven(row.id)
        except (BackendError, CatalogError) as error:
            log.warning("generation %d of run %r is committed, its proof is pending: %s", row.id, row.run, error)
            if attempt + 1 < _PROOF_ATTEMPTS:
                time.sleep(0.1 * 2**attempt)
    return row


def repeat_sql(call: Callable[[], T], *, until: float) -> T:
    """Repeat a call of the catalog while nothing was established, until ``until`` (``time.monotonic``)."""
    pause = 0.05
    while True:
        try:
            return call()
        except CatalogError as error:
            if not error.transient or time.monotonic() + pause > until:
                raise
            log.warning("the catalog did not answer, trying again: %s", error)
        time.sleep(pause)
        pause = min(pause * 2, 2.0)


def parent_of(site: Site, row: GenerationRecord) -> str | None:
    """Key of the generation that ``row`` continues: its launch's last committed one, else what that launch restored."""
    catalog = site.sql()
    own = catalog.last_committed_of(row.launch_id)
    if own is not None:
        return own.key
    launch = catalog.launch(row.launch_id)
    return launch.restored_from
