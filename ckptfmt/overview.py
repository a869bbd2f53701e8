"""Lists of runs and generations, from the catalog or by proof."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptfmt.engine.reports import GenerationInfo, RunInfo
from ckptfmt.engine.site import Site
from ckptfmt.errors import InvalidInput, NotFound
from ckptfmt.format import layout
from ckptfmt.format.states import State


def runs(site: Site) -> list[RunInfo]:
    if site.catalog is None:
        from ckptfmt.engine.load.resolve import proven_runs

        return [_proven_run(site, name) for name in proven_runs(site)]
    return [_run(site, row) for row in site.catalog.view("space_by_run")]


def _run(site: Site, space: Mapping[str, Any]) -> RunInfo:
    """From counts that the database made: a run of ten thousand generations is no slower to list than a new one."""
    catalog, name = site.sql(), space["run"]
    latest = catalog.latest(name)
    holder = catalog.live_launch(name)
    return RunInfo(
        name=name,
        committed=int(space["committed_generations"]),
        latest=None if latest is None else GenerationInfo.of(latest),
        in_flight=int(space["in_flight_generations"]),
        holder=None if holder is None else f"{holder.host}:{holder.pid}",
        nbytes=int(space["committed_bytes"]),
    )


def _proven_run(site: Site, name: str) -> RunInfo:
    found = generations(site, run=name, state=State.COMMITTED, limit=None)
    return RunInfo(name, len(found), found[0] if found else None, 0, None, sum(info.nbytes or 0 for info in found))


def generations(site: Site, *, run: str | None, state: str | None, limit: int | None) -> list[GenerationInfo]:
    """Newest commit first. ``state=None``: all states (by proof only committed ones can be told)."""
    if state is not None and state not in set(State):
        raise InvalidInput(f"state={state!r}: give one of {', '.join(State)}, or None for all")
    if limit is not None and limit < 1:
        raise InvalidInput(f"limit={limit!r}: give a positive number, or None")
    if site.catalog is not None:
        if run is not None and run not in {record.name for record in site.catalog.runs()}:
            raise NotFound(f"{site.backend.url} has no run {run!r}; see `ckptfmt ls`")
        states = None if state is None else [State(state)]
        return [GenerationInfo.of(row) for row in site.catalog.generations(run=run, states=states, limit=limit)]
    if state not in (None, State.COMMITTED):
        raise InvalidInput(
            f"{site.backend.url} is read by proof: only committed generations can be told, not {state!r}"
        )
    return _proven_generations(site, run, limit)


def _proven_generations(site: Site, run: str | None, limit: int | None) -> list[GenerationInfo]:
    # Here and above: reading by proof loads the whole reader, which listing a catalog does not need.
    from ckptfmt.engine.load.resolve import proven, proven_runs
    from ckptfmt.engine.opened import info_of

    infos = []
    for name in [run] if run is not None else proven_runs(site):
        for _, commit in proven(site, layout.run_key(name)):
            infos.append(info_of(commit))
            if limit is not None and len(infos) == limit:
                return infos
    return infos
