"""What a killed launch had staged: finished from the stage, if that can be reached (spec/tiers.md, "Resuming").

Staged is no acknowledgement. So whoever settles the generation does for the dead rank what it would have done: copies
its packs, compared chunk by chunk, creates its part, and acknowledges it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Final

import msgspec

from ckptfmt.engine import protocol, stage, verdicts
from ckptfmt.engine.packs import packs_to_copy
from ckptfmt.engine.replicate import Copying, Pace, Source
from ckptfmt.engine.site import Site
from ckptfmt.engine.tiers import Tier
from ckptfmt.engine.verdicts import read_object
from ckptfmt.errors import BackendError, Conflict, Corrupt, FormatError, NotFound
from ckptfmt.format import layout
from ckptfmt.format.manifest import manifest_digest
from ckptfmt.format.part import PART_BYTES_MAX, Part, decode_part, encode_part
from ckptfmt.ports.records import GenerationRecord, RankRecord

log = logging.getLogger("ckptfmt")

GiveUp = Callable[[], None]
"""Raises once the run is somebody else's, to end a long copy."""

_PART_NAMES_MAX: Final = 8
_AWAY_SECONDS: Final = 10.0
"""How long a tier that does not answer is asked again: after that nothing is staged there."""


def find_staged(site: Site, row: GenerationRecord, ranks: Sequence[RankRecord]) -> dict[int, Part]:
    """The staged parts of those of ``ranks`` that are not durable, where all their packs lie on the stage as well.

    Lengths are compared, not bytes: copying does that. A stage that is away is asked again, for a while: it may be gone
    for good, and must keep no launch out.
    """
    tier = site.tiers.stage
    if tier is None:
        return {}
    found, until = {}, time.monotonic() + _AWAY_SECONDS
    for record in ranks:
        if record.state not in ("writing", "staged"):
            continue
        try:
            found[record.rank] = protocol.repeat(partial(_staged_part, tier, row, record.rank), until=until)
        except (NotFound, FormatError, BackendError) as error:
            log.info("generation %d of run %r: rank %d is not staged here: %s", row.id, row.run, record.rank, error)
    return found


def _staged_part(tier: Tier, row: GenerationRecord, rank: int) -> Part:
    backend, folder = tier.backend, verdicts.folder_of(row)
    key = f"{folder}/{layout.staged_part_name(rank)}"
    part = read_object(backend, key, decode_part, limit=PART_BYTES_MAX)
    if (part.key, part.rank, part.step) != (row.key, rank, row.step):
        raise Corrupt(f"{backend.url}: {key} is of another generation, rank or step", object=key)
    for pack in part.packs:
        place = f"{folder}/{pack.name}"
        if pack.generation is None and backend.head(place).nbytes != pack.nbytes:
            raise Corrupt(f"{backend.url}: {place} is not as long as {key} says", object=place)
    return part


def can_finish_staged(site: Site, row: GenerationRecord) -> bool:
    """Whether ``finish_staged`` has something to finish, and all that is missing is there. Changes nothing."""
    ranks = site.sql().ranks(row.id)
    found = find_staged(site, row, ranks)
    return bool(found) and len(found) == sum(record.state != "durable" for record in ranks)


def free_aborted(site: Site, row: GenerationRecord) -> None:
    """What the stage held of a generation that is aborted now is of no use to anybody."""
    tier = site.tiers.stage
    if tier is None:
        return
    try:
        held = [each for each in stage.held(tier) if each.key == row.key]
    except BackendError as error:
        log.warning("%s is not cleaned: %s", tier.name, error)
        return
    for each in held:
        stage.free(tier, each.run_key, each.key, each.names)


def finish_staged(site: Site, row: GenerationRecord, give_up: GiveUp) -> bool:
    """Do C2b and C2c for every rank that is staged here and not durable. False if there is none.

    Raises what shows that one cannot be finished, or that storage or the catalog is away; ``Conflict`` if the row is no
    longer ``writing``.
    """
    records = {record.rank: record for record in site.sql().ranks(row.id)}
    found = find_staged(site, row, list(records.values()))
    if len(found) < sum(record.state != "durable" for record in records.values()):
        return False  # it cannot be finished: nothing is copied in vain
    for rank, part in found.items():
        log.warning("generation %d of run %r: rank %d is finished from the stage", row.id, row.run, rank)
        _finish_rank(site, row, records[rank], part, give_up)
    return bool(found)


def _finish_rank(site: Site, row: GenerationRecord, record: RankRecord, part: Part, give_up: GiveUp) -> None:
    tier, began, rank = site.tiers.stage, time.perf_counter(), record.rank
    if tier is None:
        raise AssertionError("nothing is staged without a stage")
    packs = packs_to_copy(part)
    pace = Pace(limiter=site.tiers.limiter, give_up=give_up)
    folder = verdicts.folder_of(row)
    names = Copying([Source(tier.backend)], site.backend, folder, pace).copy(packs, partial(layout.pack_name, rank))
    rows = [msgspec.structs.replace(pack.row, name=name) for pack, name in zip(packs, names, strict=True)]
    part = _spread(site, folder, msgspec.structs.replace(part, packs=rows), pace)
    stored = encode_part(part)
    name = _create_part(site, folder, rank, stored)
    site.sql().report_rank(
        row.id,
        rank,
        state="durable",
        part_name=name,
        part_digest=manifest_digest(stored),
        nbytes=sum(nbytes for pack in packs for span in pack.spans for *_, nbytes in span.chunks),
        stall_seconds=record.stall_seconds,
        write_seconds=time.perf_counter() - began,
        retries=record.retries,
        staged_tier=tier.uuid,
        staged_bytes=sum(pack.row.nbytes for pack in packs),
        replicated_bytes=sum(pack.row.nbytes for pack in packs),
    )


def _spread(site: Site, folder: str, part: Part, pace: Pace) -> Part:
    """Onto as many replicas as ``durable_on`` asks for."""
    chosen = site.tiers.replicas[: site.tiers.durable_on - 1]
    if not chosen:
        return part
    packs = packs_to_copy(part)
    for tier in chosen:
        protocol.repeat(partial(tier.backend.make_folder, folder), until=time.monotonic() + _AWAY_SECONDS)
        copying = Copying([Source(site.backend)], tier.backend, folder, pace, replaces=True)
        copying.copy(packs, lambda position, attempt: packs[position].row.name)
    return msgspec.structs.replace(part, tiers=sorted(tier.uuid for tier in chosen))


def _create_part(site: Site, folder: str, rank: int, stored: bytes) -> str:
    """Under a new name where the dead rank had created its own already, which tells other names of packs."""
    for attempt in count():
        name = layout.part_name(rank, attempt)
        try:
            site.backend.create(f"{folder}/{name}", stored)
        except Conflict:
            if attempt == _PART_NAMES_MAX:
                raise
        else:
            return name
    raise AssertionError("counting has ended")
