"""A root that was moved still holds what was committed last; a copy that the original has left behind does not.

For catalogs that many hosts use: where the original of a copy cannot be seen, this is what tells the two apart, as
soon as one of them has gone on (spec/decisions/010-copied-roots.md).
"""

from __future__ import annotations

from ckptfmt.engine import verdicts
from ckptfmt.engine.site import Site
from ckptfmt.errors import Conflict, NotFound
from ckptfmt.format import layout
from ckptfmt.format.states import State
from ckptfmt.ports.records import GenerationRecord

_LOOKED_AT = 10
"""Newest commits of a run among which one is proven: a launch leaves few without a proof."""


def require_latest(site: Site, last: str) -> None:
    """``Conflict`` of the kind ``copied_root`` if the newest proven generation of a run is not on this storage.

    ``last`` is the URL where the catalog was opened for writing before. Costs one look at an object for each run.
    """
    catalog = site.sql()
    for run in catalog.runs():
        row = _newest_proven(site, run.name)
        if row is not None and not _is_here(site, row):
            raise Conflict(
                f"{site.backend.url} does not hold generation {row.id} of run {run.name!r} "
                f"({verdicts.folder_of(row)}), which was committed through the catalog {catalog.url} into "
                f"{last}: it is a copy of that root, or what it was before; write to that one, or give "
                f"this one a catalog of its own: `ckptfmt db adopt {site.backend.url} --catalog URL`",
                kind="copied_root",
            )


def _newest_proven(site: Site, run: str) -> GenerationRecord | None:
    rows = site.sql().generations(run=run, states=[State.COMMITTED], limit=_LOOKED_AT)
    return next((row for row in rows if row.proven_at is not None and row.quarantined_at is None), None)


def _is_here(site: Site, row: GenerationRecord) -> bool:
    try:
        site.backend.head(f"{verdicts.folder_of(row)}/{layout.COMMIT}")
    except NotFound:
        return False
    return True
