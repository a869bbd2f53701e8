"""Removing the objects of a generation that is not committed (any more), in the one order that is safe.

The verdict comes first: COMMIT.json (aborted) or RETIRED.json closes the key for ever, then packs, parts and
manifests go, then the row says so. A crash in between leaves too much, never too little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from ckptfmt.engine import verdicts
from ckptfmt.engine.site import Site
from ckptfmt.errors import Conflict, FormatError
from ckptfmt.format import layout, verdict
from ckptfmt.ports.backend import ObjectInfo
from ckptfmt.ports.records import GenerationRecord

TOMBSTONES = frozenset({layout.COMMIT, layout.RETIRED})
CLOSED = "tombstone"
"""Kind of the event that says: the tombstone is durable. Written after it, so that its time is never too early."""


@dataclass(frozen=True)
class Swept:
    objects: tuple[ObjectInfo, ...]
    adopted: bool = False
    """A committed verdict was found: nothing was deleted, the row must be adopted."""


def close_aborted(site: Site, row: GenerationRecord) -> bool:
    """Put the aborted verdict into the slot. False if a committed one is there already."""
    folder = verdicts.folder_of(row)
    if not site.backend.has_folder(folder):
        site.backend.make_folder(folder)  # the slot must be closed even where nothing was ever written
    try:
        site.backend.create(f"{folder}/{layout.COMMIT}", verdict.encode_commit(verdicts.aborted_of(site, row)))
    except Conflict:
        found = verdicts.read_commit(site.backend, folder)
        if found is None or not verdicts.belongs(found, site, row):
            raise
        return found.verdict == "aborted"
    return True


def is_torn_abort(site: Site, row: GenerationRecord) -> bool:
    """Whether the slot holds a beginning of the aborted verdict: whoever wrote it was killed where objects are written
    in place."""
    stored = site.backend.read(f"{verdicts.folder_of(row)}/{layout.COMMIT}", limit=verdict.BYTES_MAX)
    whole = verdict.encode_commit(verdicts.aborted_of(site, row))
    return len(stored) < len(whole) and whole.startswith(stored)


def close_retired(site: Site, row: GenerationRecord) -> datetime:
    """Put the tombstone into the slot of a retired generation: from here on nobody opens it by proof.

    The catalog notes when that was: the grace counts from there, and it is returned. ``Conflict`` if another object is
    in its place.
    """
    if row.retired_at is None:
        raise Conflict(f"generation {row.id} is {row.state} without a time")
    stone = verdict.Retired(
        repository=site.repository,
        run=row.run,
        id=row.id,
        key=row.key,
        retired_at=verdict.timestamp(row.retired_at),
    )
    since = closed_at(site, row)
    found = _tombstone(site, row)
    if since is not None and found == stone:
        return since
    # Also where it can be seen: whoever made it may have died before it was durable.
    site.backend.create(f"{verdicts.folder_of(row)}/{layout.RETIRED}", verdict.encode_retired(stone))
    return note_closed(site, row) if since is None or found is None else since


def _tombstone(site: Site, row: GenerationRecord) -> verdict.Retired | None:
    """None also for a damaged one: in its place none can be made, which then tells."""
    try:
        return verdicts.read_retired(site.backend, verdicts.folder_of(row))
    except FormatError:
        return None


def is_closed(site: Site, row: GenerationRecord) -> bool:
    """Whether a retired generation has its tombstone. A damaged one keeps readers out as well."""
    try:
        return verdicts.read_retired(site.backend, verdicts.folder_of(row)) is not None
    except FormatError:
        return True


def note_closed(site: Site, row: GenerationRecord) -> datetime:
    """Say in the catalog that the tombstone is durable now; return that time, by the database's clock."""
    site.sql().note(row.run, generation_id=row.id, kind=CLOSED, detail={})
    since = closed_at(site, row)
    if since is None:
        raise AssertionError(f"generation {row.id}: the note of its tombstone is gone")
    return since


def closed_at(site: Site, row: GenerationRecord) -> datetime | None:
    """Since when certainly nobody opens a retired generation any more, by the database's clock.

    None if nobody has said so: whoever retired it died in between, or the catalog was put back or rebuilt.
    """
    noted = [event.at for event in site.sql().events(generation_id=row.id) if event.kind == CLOSED]
    return max(noted, default=None)


def sweep_aborted(site: Site, row: GenerationRecord) -> Swept:
    """Close an aborted generation's key and remove its objects."""
    if not close_aborted(site, row):
        return Swept((), adopted=True)
    return Swept(remove(site, row, removable(site, row)))  # what is there once the key is closed


def removable(site: Site, row: GenerationRecord) -> list[ObjectInfo]:
    """Objects under the generation's key other than its tombstones and the packs that another one refers to."""
    found = ((info, info.key.rpartition("/")[2]) for info in site.backend.list(verdicts.folder_of(row)))
    return [info for info, name in found if name not in TOMBSTONES and not _used_elsewhere(site, row, name)]


def _used_elsewhere(site: Site, row: GenerationRecord, name: str) -> bool:
    return any(user != row.id for user in site.sql().pack_users(row.key, name))


def remove(site: Site, row: GenerationRecord, objects: Sequence[ObjectInfo]) -> tuple[ObjectInfo, ...]:
    """Delete the removable objects of a generation whose tombstone is durable and whose grace is over; say so."""
    for info in objects:
        site.backend.delete(info.key)
    site.sql().mark_swept(row.id)
    return tuple(objects)


def sweep_share(site: Site, row: GenerationRecord, names: Sequence[str]) -> None:
    """Close an aborted generation's key and remove what one rank began under these ``names``, and writes no longer; gc
    does the rest. Without a listing: of many ranks each would see what all have written.

    No other generation can refer to packs of one that was never committed.
    """
    if not close_aborted(site, row):
        return
    for name in names:
        site.backend.delete(f"{verdicts.folder_of(row)}/{name}")
