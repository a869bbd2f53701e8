"""C3, C4 and C5 of the commit protocol (spec/commit-protocol.md).

A save finishes itself through these steps, and a takeover or recover finishes what an older launch left
through the very same ones. Each may be repeated after a crash or a lost answer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from ckptfmt.engine import verdicts
from ckptfmt.engine.collector import held_back
from ckptfmt.engine.rereading import read_whole
from ckptfmt.engine.site import Site
from ckptfmt.engine.transfer import IO_THREADS, run_all
from ckptfmt.errors import (
    BackendError,
    CatalogError,
    CkptError,
    Conflict,
    Corrupt,
    FormatError,
    NotFound,
    SaveFailed,
)
from ckptfmt.format import layout, verdict
from ckptfmt.format.manifest import Manifest, Sound, encode_sound, manifest_digest
from ckptfmt.format.merge import merge_parts
from ckptfmt.format.part import PART_BYTES_MAX, Part
from ckptfmt.format.part_reader import PartReader
from ckptfmt.format.states import OPEN_STATES, State
from ckptfmt.format.tables import PackRow
from ckptfmt.ports.backend import Backend
from ckptfmt.ports.records import DurableFacts, GenerationRecord, PackRecord, RankRecord

log = logging.getLogger("ckptfmt")

T = TypeVar("T")
Noted = Callable[[CkptError], None]
"""Told of each error of a call that is repeated."""
_PARTS_AT_ONCE = 64
"""So many parts are in memory as they are stored."""
_LISTED_FROM = 64
_LISTED_FROM_DISTANT = 2
"""So many packs are found faster by one listing than one by one."""
_PROOF_SECONDS = 3.0
"""How long storage may refuse a proof before it is left to recover."""


def _unnoted(error: CkptError) -> None:
    """Nobody asks."""


def read_parts(site: Site, row: GenerationRecord, ranks: Sequence[RankRecord]) -> list[Part]:
    """Read every rank's part and compare it with the digest that the rank acknowledged."""
    reader = PartReader()
    parts: list[Part] = []
    ordered = sorted(ranks, key=lambda record: record.rank)
    for at in range(0, len(ordered), _PARTS_AT_ONCE):
        for stored in _stored_parts(site, row, ordered[at : at + _PARTS_AT_ONCE]):
            with held_back():
                parts.append(reader.read(stored))
    return parts


def _stored_parts(site: Site, row: GenerationRecord, ranks: Sequence[RankRecord]) -> list[bytes]:
    """The bytes of some parts, several under way at once: a distant place answers none of them soon."""
    found = [b""] * len(ranks)

    def read(number: int) -> None:
        found[number] = _stored_part(site, row, ranks[number])

    tasks = [lambda number=number: read(number) for number in range(len(ranks))]
    run_all(tasks, threads=IO_THREADS, name="ckptfmt-parts")
    return found


def _stored_part(site: Site, row: GenerationRecord, rank: RankRecord) -> bytes:
    if rank.part_name is None or rank.part_digest is None:
        raise SaveFailed(
            f"generation {row.id}: rank {rank.rank} has not acknowledged its part",
            stage="merge",
            rank=rank.rank,
            key=row.key,
            generation_id=row.id,
        )
    key = f"{verdicts.folder_of(row)}/{rank.part_name}"

    def read() -> bytes:
        stored = site.backend.read(key, limit=PART_BYTES_MAX)
        if manifest_digest(stored) != rank.part_digest:
            raise Corrupt(
                f"{site.backend.url}: {key} differs from the part that rank {rank.rank} acknowledged (generation "
                f"{row.id})",
                object=key,
            )
        return stored

    return read_whole(read)


def check_packs(site: Site, folder: str, manifest: Manifest) -> None:
    """Every pack that the manifest names is there with its length. The error names every one that is not."""
    raise_faults(pack_faults(site.backend, folder, manifest, manifest.packs))


def raise_faults(faults: Mapping[str, CkptError]) -> None:
    """Raise the first of ``faults``, naming the keys of all others; nothing where there is none."""
    if faults:
        (_, first), *others = faults.items()
        if others:
            first.message += f"; also damaged or gone: {', '.join(key for key, _ in others)}"
        raise first


def pack_faults(backend: Backend, folder: str, manifest: Manifest, packs: Sequence[PackRow]) -> dict[str, CkptError]:
    """Those of ``packs`` that are not there with their length, by key, and what to raise for each."""
    faults: dict[str, CkptError] = {}
    listed = _listed(backend, folder, packs)
    for pack in packs:
        key = pack_key(folder, pack)
        if listed.get(key) == pack.nbytes:
            continue
        fault = _pack_fault(backend, key, pack.nbytes, manifest)
        if fault is not None:
            faults[key] = fault
    return faults


def pack_key(folder: str, pack: PackRow) -> str:
    """Where a pack of the generation in ``folder`` lies, on every tier."""
    place = folder if pack.generation is None else f"{folder.rpartition('/')[0]}/{pack.generation}"
    return f"{place}/{pack.name}" if place else pack.name


def _listed(backend: Backend, folder: str, packs: Sequence[PackRow]) -> dict[str, int]:
    """The objects beside many packs, by one listing; what it does not show, or shows otherwise, is looked at by itself.
    Empty where packs are few, or listing is refused."""
    if len(packs) < (_LISTED_FROM_DISTANT if backend.traits.distant else _LISTED_FROM):
        return {}
    try:
        return {found.key: found.nbytes for found in backend.list(folder)}
    except BackendError:
        return {}


def _pack_fault(backend: Backend, key: str, nbytes: int, manifest: Manifest) -> CkptError | None:
    name = f"{backend.url}: pack {key} of generation {manifest.id} (run {manifest.run!r})"
    advice = "restore an older generation with at=..., or put the object back from a copy"
    try:
        found = backend.head(key).nbytes
    except NotFound:
        return NotFound(f"{name} is not there; {advice}", kind="object_missing")
    if found == nbytes:
        return None
    return Corrupt(f"{name} has {found} bytes, recorded are {nbytes}; {advice}", object=key)


def merged_manifest(site: Site, row: GenerationRecord, *, parent: str | None) -> Sound:
    """The manifest that C3 would store; every part and pack is checked, nothing is written."""
    ranks = site.sql().ranks(row.id)
    parts = read_parts(site, row, ranks)
    with held_back():
        sound = merge_parts(
            parts,
            id=row.id,
            parent=parent,
            repository=site.repository,
            run=row.run,
            members=[record.rank for record in ranks],
            world_size=row.world_size,
        )
    check_packs(site, verdicts.folder_of(row), sound.manifest)
    return sound


def merge(site: Site, row: GenerationRecord, *, parent: str | None, fence: int) -> GenerationRecord:
    """C3: from every rank's part to the manifest on storage and the row ``durable``."""
    sound = merged_manifest(site, row, parent=parent)
    stored = encode_sound(sound)
    digest = manifest_digest(stored)
    name = layout.manifest_name(digest)
    site.backend.create(f"{verdicts.folder_of(row)}/{name}", stored)
    facts = durable_facts(sound.manifest, row.key, name, digest, len(stored))
    return site.sql().mark_durable(row.id, facts, fence=fence)


def durable_facts(manifest: Manifest, key: str, name: str, digest: str, nbytes: int) -> DurableFacts:
    return DurableFacts(
        manifest_name=name,
        manifest_digest=digest,
        manifest_bytes=nbytes,
        nbytes=manifest.nbytes,
        parent_key=manifest.parent,
        tiers=tuple(manifest.tiers or ()),
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


def commit(site: Site, row: GenerationRecord, *, fence: int, until: float, noted: Noted = _unnoted) -> GenerationRecord:
    """C4, the commit point. A doubtful answer is resolved by repeating the compare-and-swap, until ``until``
    (``time.monotonic``)."""
    return repeat(lambda: site.sql().commit(row.id, fence=fence), until=until, noted=noted)


def prove(site: Site, row: GenerationRecord) -> GenerationRecord:
    """C5: COMMIT.json and the hint that lets a listing find it; then the row says so.

    If storage keeps refusing, the row is returned unproven: it is committed, and recover finishes it. ``Conflict`` of
    the kind ``disproved`` if storage says that it was aborted: then its bytes may go, and nobody may call it saved.
    """
    folder = verdicts.folder_of(row)
    record = verdict.encode_commit(verdicts.commit_of(site, row))

    def put() -> GenerationRecord:
        site.backend.create(f"{folder}/{layout.COMMIT}", record)
        create_hint(site, row.run_key, row.key, epoch=row.epoch, seq=row.commit_seq or 0)
        return site.sql().set_proven(row.id)

    try:
        return repeat(put, until=time.monotonic() + _PROOF_SECONDS)
    except Conflict as error:  # somebody put another verdict into the slot
        _require_not_aborted(site, row, error)
        log.error("generation %d of run %r is committed but cannot be proved: %s", row.id, row.run, error)
    except (BackendError, CatalogError) as error:
        log.warning("generation %d of run %r is committed, its proof is pending: %s", row.id, row.run, error)
    return row


def _require_not_aborted(site: Site, row: GenerationRecord, error: Conflict) -> None:
    folder = verdicts.folder_of(row)
    try:
        found = verdicts.read_commit(site.backend, folder)
    except (FormatError, BackendError):
        return
    told = None if found is None else disproof(site, row, found)
    if told is not None:
        raise told from error


def disproof(site: Site, row: GenerationRecord, found: verdict.Commit) -> Conflict | None:
    """What to raise where the verdict on storage, ``found``, says that this committed generation was aborted."""
    if found.verdict != "aborted" or not verdicts.belongs(found, site, row):
        return None
    return Conflict(
        f"generation {row.id} of run {row.run!r} is committed in the catalog, but {site.backend.url}: "
        f"{verdicts.folder_of(row)}/{layout.COMMIT} says that it was aborted ({found.reason}): the catalog was put "
        f"back from a copy; run `ckptfmt db rebuild --merge {site.backend.url}`",
        kind="disproved",
    )


def create_hint(site: Site, run_key: str, key: str, *, epoch: int, seq: int) -> None:
    """The object by which one listing finds a commit. Before anything calls the generation proven."""
    site.backend.make_folder(layout.commits_folder(run_key))
    site.backend.create(layout.commit_hint(run_key, epoch, seq, key), b"")


def settle_lower(site: Site, row: GenerationRecord, *, fence: int, until: float, noted: Noted = _unnoted) -> None:
    """Bring earlier saves of ``row``'s launch to a verdict where theirs stayed unknown: C3 waits for them.

    Their handles have given up, so nobody else would as long as this launch lives.
    """
    rows = repeat(lambda: site.sql().generations(run=row.run, states=sorted(OPEN_STATES)), until=until, noted=noted)
    lower = [other for other in rows if other.launch_id == row.launch_id and other.save_number < row.save_number]
    for other in sorted(lower, key=lambda other: other.save_number):
        if other.state is State.DURABLE:
            try:
                prove(site, commit(site, other, fence=fence, until=until, noted=noted))
            except Conflict as error:
                if error.kind != "disproved":
                    raise
                log.error("%s", error)  # told to whoever asks for that save; this one goes on
            continue
        repeat(lambda other=other: _abandon(site, other, fence), until=until, noted=noted)  # type: ignore[misc]


def _abandon(site: Site, row: GenerationRecord, fence: int) -> None:
    site.sql().abort(row.id, stage="merge", rank=None, reason="its save ended without a verdict", fence=fence)


def repeat(call: Callable[[], T], *, until: float, noted: Noted = _unnoted) -> T:
    """Repeat a call that may be repeated while it fails for a passing reason, until ``until`` (``time.monotonic``).
    ``noted`` gets each error.

    Creates and transitions are such calls: the second one finds what the first has done when its answer was lost.
    """
    pause = 0.05
    while True:
        try:
            return call()
        except (CatalogError, BackendError) as error:
            noted(error)
            if not error.transient or time.monotonic() + pause > until:
                raise
            log.warning("trying again: %s", error)
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
