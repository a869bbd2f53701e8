"""What unfinished creates left on storage: removed only where nobody can still be finishing it.

How old a leftover is nothing tells that could be trusted: the clock of the host that made it may be wrong, and so may
ours. So there are two looks, some time of our own apart, and only what both see goes, by its exact key. Whoever
begins to write after the first look takes new names, and is not hit. Before it, a launch that may live keeps its run's
leftovers, and those of the repository itself. Who creates without a launch (opening, retiring, gc, a rebuild) would
have to need the whole time between the looks for one small object; it would be told that the object could not be
created, and nothing would be lost.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from ckptfmt.engine import process
from ckptfmt.engine.reports import GcItem
from ckptfmt.engine.site import Site
from ckptfmt.format import layout
from ckptfmt.ports.backend import ObjectInfo
from ckptfmt.ports.records import RunRecord

BETWEEN_LOOKS_SECONDS = 1.0
_REASON = "unfinished create"


@dataclass(frozen=True)
class _Place:
    prefix: str
    writers: tuple[RunRecord, ...]
    """Runs whose launches may be creating objects there."""
    run: str
    """'' for what belongs to the repository as a whole."""
    deep: bool


@dataclass(frozen=True)
class FirstLook:
    taken: float
    """``time.monotonic``."""
    found: tuple[tuple[_Place, tuple[ObjectInfo, ...]], ...]


def look(site: Site, runs: Sequence[RunRecord]) -> FirstLook:
    """Find leftovers where no launch lives. ``runs`` are all runs of the repository; held ones are left alone."""
    taken = time.monotonic()
    idle = [run for run in runs if not _is_held_by_a_launch(site, run)]
    places = [_Place(layout.run_folder(run.key), (run,), run.name, True) for run in idle if not run.retention_hold]
    if len(idle) == len(runs):
        everyone = tuple(runs)
        # The root itself not in depth: other folders there are not ours, and may be repositories at work.
        places += [_Place("", everyone, "", False), _Place(layout.CATALOGS, everyone, "", True)]
    found = []
    for place in places:
        leftovers = tuple(site.backend.sweep_debris(place.prefix, dry_run=True, deep=place.deep))
        if leftovers and not any(_is_silent_but_here(site, run) for run in place.writers):
            found.append((place, leftovers))
    return FirstLook(taken, tuple(found))


def sweep(site: Site, first: FirstLook, *, dry_run: bool) -> list[GcItem]:
    """Remove what the first look saw and is still there; with ``dry_run`` list what it saw."""
    if first.found and not dry_run:
        time.sleep(max(0.0, first.taken + BETWEEN_LOOKS_SECONDS - time.monotonic()))
    items = []
    for place, leftovers in first.found:
        gone: Sequence[ObjectInfo] = leftovers
        if not dry_run:
            keys = frozenset(info.key for info in leftovers)
            gone = site.backend.sweep_debris(place.prefix, dry_run=False, deep=place.deep, only=keys)
        items += [GcItem(0, place.run, info.key, info.nbytes, _REASON) for info in gone]
    return items


def _is_held_by_a_launch(site: Site, run: RunRecord) -> bool:
    """Whether a lease runs whose holder is not certainly dead."""
    holder = site.sql().live_launch(run.name)
    return holder is not None and not process.is_gone(holder)


def _is_silent_but_here(site: Site, run: RunRecord) -> bool:
    """Whether the run's last launch has let its lease lapse, but lives on this host: stopped, or cut off from the
    catalog. It may still go on."""
    return any(
        launch.fence == run.fence and launch.closed_at is None and process.is_here(launch)
        for launch in site.sql().launches(run.name)
    )
