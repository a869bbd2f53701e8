"""What tiers lack: from the catalog, or by proof from the hints of commits that lie on either side."""

from __future__ import annotations

from dataclasses import dataclass

from ckptfmt.engine.reports import Report
from ckptfmt.engine.site import Site
from ckptfmt.engine.tiers import Tier
from ckptfmt.format import layout
from ckptfmt.format.states import State
from ckptfmt.ports.backend import Backend


@dataclass(frozen=True)
class TierLag(Report):
    """What one tier lacks of a run's committed generations."""

    run: str
    role: str
    url: str
    newest_id: int | None
    """The run's newest commit; None: none, or by proof, as all other ids and steps."""
    newest_step: int | None
    held_id: int | None
    """The newest that the tier holds whole."""
    held_step: int | None
    generations: int
    """How many it does not hold whole; of a stage: how many are staged and not durable."""
    nbytes: int | None
    """Bytes of their packs that it lacks; of a stage: that the durable tier lacks. None: by proof."""
    seconds: float | None
    """Age of the oldest of them. None: it lacks nothing, or by proof."""
    problem: str | None = None
    """Why it cannot be opened, if it cannot."""


def lag_by_catalog(site: Site, run: str | None) -> list[TierLag]:
    """What each replica that the catalog knows lacks, and what waits on stages."""
    rows = site.sql().view("replica_lag", run=run)
    found = [
        TierLag(
            run=row["run"],
            role="replica",
            url=row["url"],
            newest_id=row["newest_generation_id"],
            newest_step=row["newest_step"],
            held_id=row["replicated_generation_id"],
            held_step=row["replicated_step"],
            generations=int(row["generations_behind"]),
            nbytes=int(row["bytes_behind"]),
            seconds=None if row["seconds_behind"] is None else float(row["seconds_behind"]),
        )
        for row in rows
    ]
    return [*_waiting(site, run), *found]


def _waiting(site: Site, run: str | None) -> list[TierLag]:
    """What ranks have staged of generations that are not durable: nothing acknowledges it."""
    catalog = site.sql()
    urls = {tier.uuid: tier.url for tier in catalog.tiers()}
    waiting: dict[tuple[str, str], list[tuple[int, int, float]]] = {}
    now = catalog.database_now()
    for row in catalog.generations(run=run, states=[State.WRITING]):
        for rank in catalog.ranks(row.id):
            if rank.state == "staged" and rank.staged_tier is not None and rank.staged_at is not None:
                left = (rank.staged_bytes or 0) - (rank.replicated_bytes or 0)
                age = (now - rank.staged_at).total_seconds()
                waiting.setdefault((row.run, rank.staged_tier), []).append((row.id, left, age))
    return [
        TierLag(
            run=name,
            role="stage",
            url=urls.get(tier, tier),
            newest_id=None,
            newest_step=None,
            held_id=None,
            held_step=None,
            generations=len({generation for generation, *_ in items}),
            nbytes=sum(nbytes for _, nbytes, _ in items),
            seconds=max(age for *_, age in items),
        )
        for (name, tier), items in sorted(waiting.items())
    ]


def lag_by_proof(site: Site, run: str) -> list[TierLag]:
    """What each replica lacks of the commits that storage proves: one listing on each side."""
    run_key = layout.run_key(run)
    proven = _hints(site.backend, run_key)
    return [_lag(tier, run, run_key, proven) for tier in site.tiers.replicas]


def _lag(tier: Tier, run: str, run_key: str, proven: set[str]) -> TierLag:
    missing = proven - _hints(tier.backend, run_key)
    return TierLag(run, tier.role, tier.backend.url, None, None, None, None, len(missing), None, None)


def _hints(backend: Backend, run_key: str) -> set[str]:
    """A replica gets the hint last of all: where it is, the generation is whole."""
    names = (info.key.rpartition("/")[2] for info in backend.list(layout.commits_folder(run_key)))
    return {name for name in names if layout.parse_commit_hint(name) is not None}
