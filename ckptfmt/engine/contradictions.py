"""What storage proves and the catalog does not know: the catalog was put back, replaced or lost.

Storage follows the catalog: a folder, a verdict, a hint, a tombstone are made after the transaction that they stand
for. So storage is listed first and the catalog asked afterwards, and whatever storage shows then must be in the
catalog, also while others save. Costs one listing; an object is read only where names alone do not agree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ckptfmt.engine import verdicts
from ckptfmt.engine.site import Site
from ckptfmt.engine.survey import RunSurvey, survey
from ckptfmt.errors import CatalogBehind, FormatError
from ckptfmt.format import layout, verdict
from ckptfmt.format.naming import shown
from ckptfmt.format.states import OPEN_STATES, State
from ckptfmt.ports.catalog import States


@dataclass(frozen=True)
class Contradiction:
    """One generation of which storage proves something else than the catalog says."""

    run: str
    key: str
    id: int
    proven: str
    """``committed``, ``aborted`` or ``retired``."""
    known: str
    """Its state in the catalog, ``unknown`` without a row."""

    def __str__(self) -> str:
        return f"#{self.id} ({self.proven} on storage, {self.known} in the catalog)"


def require_none(site: Site) -> None:
    """``CatalogBehind``, naming runs and generations, if storage proves what the catalog does not know."""
    found = contradictions(site)
    if not found:
        return
    by_run: dict[str, list[Contradiction]] = {}
    for one in found:
        by_run.setdefault(one.run, []).append(one)
    told = "; ".join(f"run {run!r}: {shown(members)}" for run, members in by_run.items())
    raise CatalogBehind(
        f"the catalog {site.sql().url} does not know what {site.backend.url} proves: {told}. It was put back "
        f"from a copy, or replaced; nothing is written or deleted before "
        f"`ckptfmt db rebuild --merge {site.backend.url}`"
    )


def contradictions(site: Site) -> list[Contradiction]:
    """Every generation whose verdict or tombstone the catalog cannot have led to. Damaged ones prove nothing."""
    surveys = survey(site.backend)  # before the catalog is asked
    states = site.sql().states()
    found = [one for run in surveys for one in _of_run(site, run, states)]
    left_out = _left_out(site, {one.run for one in found}) if found else set()
    return [one for one in found if one.key not in left_out]


def _of_run(site: Site, run: RunSurvey, states: States) -> Iterator[Contradiction]:
    hinted = {hint.key for hint in run.hints}
    for key, names in run.folders.items():
        state, seq = states.get(key, (None, None))
        committed = state is State.COMMITTED
        ask_commit = layout.COMMIT in names and (
            (seq is None and key in hinted)
            or state is None
            or state in OPEN_STATES
            or (committed and key not in hinted)
        )
        ask_stone = committed and layout.RETIRED in names
        if not ask_commit and not ask_stone:
            continue
        folder = layout.generation_folder(run.run_key, key)
        proven = _proven(site, folder, key, run.run_key) if ask_commit else None
        if ask_stone and _is_retired(site, folder, key):
            proven = proven or _proven(site, folder, key, run.run_key)
            if proven is not None:
                yield Contradiction(proven.run, key, proven.id, "retired", State.COMMITTED)
        elif proven is not None and _contradicts(proven, state, seq):
            yield Contradiction(proven.run, key, proven.id, proven.verdict, state or "unknown")


def _contradicts(found: verdict.Commit, state: State | None, seq: int | None) -> bool:
    if found.verdict == "committed":
        return seq is None
    # The row is aborted before the slot says so: one that is still open was put back.
    return state is None or state is State.COMMITTED or state in OPEN_STATES


def _proven(site: Site, folder: str, key: str, run_key: str) -> verdict.Commit | None:
    """The verdict in a folder, if it is sound and speaks of that folder."""
    try:
        found = verdicts.read_commit(site.backend, folder)
    except FormatError:
        return None
    if found is None or verdicts.why_elsewhere(found, site, run_key, key) is not None:
        return None
    return found


def _is_retired(site: Site, folder: str, key: str) -> bool:
    try:
        found = verdicts.read_retired(site.backend, folder)
    except FormatError:
        return False
    return found is not None and found.repository == site.repository and found.key == key


def _left_out(site: Site, runs: set[str]) -> set[str]:
    """Keys of generations that a rebuild had to leave out: they are known, though they have no row."""
    known = {run.name for run in site.sql().runs()}
    events = (event for run in runs & known for event in site.sql().events(run=run))
    return {str(event.detail.get("key")) for event in events if event.kind == "left_out"}
