"""One run: what a resume would take, who holds it, how its saves went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import median
from typing import Any

from ckptfmt.cli import contents as c
from ckptfmt.cli import quantities as q
from ckptfmt.cli.output import Page, style
from ckptfmt.cli.places import Place
from ckptfmt.cli.resume import Resume, resume_of, shown
from ckptfmt.engine.load.resolve import proven
from ckptfmt.engine.reports import GenerationInfo, Report
from ckptfmt.format import layout
from ckptfmt.format.states import State
from ckptfmt.ports.catalog import Catalog
from ckptfmt.ports.records import LaunchRecord

RECENT = 20
"""Committed generations by which saves are judged."""


@dataclass(frozen=True)
class Holder(Report):
    """The launch that holds a run's lease."""

    host: str
    pid: int
    kind: str
    since: datetime
    lease_until: datetime
    last_step: int | None


@dataclass(frozen=True)
class SaveFigures(Report):
    """Of the newest commits: median and largest, in seconds."""

    saves: int
    stall_seconds: float | None
    stall_seconds_max: float | None
    commit_seconds: float | None
    commit_seconds_max: float | None


@dataclass(frozen=True)
class RunSpace(Report):
    """Generations and bytes of packs, by what would free them."""

    committed_generations: int
    committed_bytes: int | None
    in_flight_generations: int
    in_flight_bytes: int
    reclaimable_generations: int
    reclaimable_bytes: int
    deleted_generations: int


@dataclass(frozen=True)
class RunView(Report):
    """One run."""

    name: str
    key: str
    resume: Resume
    metadata: Any
    contents: c.Contents | None
    """Of the generation that a resume takes; None if there is none, or it cannot be opened."""
    holder: Holder | None
    space: RunSpace
    saves: SaveFigures
    lag_steps: int | None
    lag_seconds: float | None


def run_view(place: Place, run: str) -> RunView:
    resume, opened = resume_of(place.site, run)
    catalog = place.site.catalog
    recent = _recent(place, run)
    lag = _lag(catalog, run)
    return RunView(
        name=run,
        key=layout.run_key(run),
        resume=resume,
        metadata=None if opened is None else c.json_value(opened.metadata()),
        contents=None if opened is None else c.contents_of(opened),
        holder=None if catalog is None else holder_of(catalog.live_launch(run)),
        space=_space(place, run),
        saves=_figures(recent),
        lag_steps=lag.get("lag_steps"),
        lag_seconds=lag.get("lag_seconds"),
    )


def holder_of(launch: LaunchRecord | None) -> Holder | None:
    if launch is None:
        return None
    return Holder(launch.host, launch.pid, launch.kind, launch.created_at, launch.lease_until, launch.last_step)


def _recent(place: Place, run: str) -> list[GenerationInfo]:
    if place.site.catalog is None:
        return []
    rows = place.site.catalog.generations(run=run, states=[State.COMMITTED], limit=RECENT)
    return [GenerationInfo.of(row) for row in rows]


def _figures(recent: Sequence[GenerationInfo]) -> SaveFigures:
    stalls = [info.stall_seconds for info in recent if info.stall_seconds is not None]
    commits = [t for info in recent if (t := q.between(info.created_at, info.committed_at)) is not None]
    return SaveFigures(
        saves=len(recent),
        stall_seconds=median(stalls) if stalls else None,
        stall_seconds_max=max(stalls, default=None),
        commit_seconds=median(commits) if commits else None,
        commit_seconds_max=max(commits, default=None),
    )


def _space(place: Place, run: str) -> RunSpace:
    if place.site.catalog is None:
        count = sum(1 for _ in proven(place.site, layout.run_key(run)))
        return RunSpace(count, None, 0, 0, 0, 0, 0)
    (row,) = place.site.catalog.view("space_by_run", run=run)
    return RunSpace(**{name: int(value or 0) for name, value in row.items() if name not in ("repository", "run")})


def _lag(catalog: Catalog | None, run: str) -> Mapping[str, Any]:
    """How far the launch that holds the run is ahead of its commits; nothing where nobody holds it."""
    rows = [] if catalog is None else catalog.view("commit_lag", run=run)
    return rows[0] if rows and rows[0]["live"] else {}


# -- pages ------------------------------------------------------------------------------------------
def show_run(
    page: Page, view: RunView, now: datetime, *, by_catalog: bool, passed_over: int = 4, entries: int | None = None
) -> None:
    """The block of one run. ``passed_over`` and ``entries`` bound its lists; by proof nobody knows who holds it."""
    _show_answer(page, view, now)
    page.facts(
        [
            *_resume_facts(page, view.resume, passed_over),
            ("held by", _holder_text(view, now) if by_catalog else ""),
            ("space", _space_text(view.space)),
            ("saves", _figures_text(view.saves)),
            ("metadata", "" if view.metadata in (None, {}) else _metadata_text(view.metadata)),
        ]
    )
    if view.contents is not None and view.resume.generation is not None:
        page.blank()
        contents_heading(page, f"Generation #{view.resume.generation.id}", view.contents)
        c.show_contents(page, view.contents, limit=entries)


def _show_answer(page: Page, view: RunView, now: datetime) -> None:
    resume, info = view.resume, view.resume.generation
    name = style(f"run {view.name}", "bold")
    if info is None:
        page.line(name, ": ", style("nothing to resume from", "yellow"))
        return
    taken = style(f"generation #{info.id}, step {info.step}", "bold", "green" if resume.problem is None else "red")
    tags = f" [{', '.join(info.tags)}]" if info.tags else ""
    page.line(name, ": a resume takes ", taken, f", committed {q.age(info.committed_at, now)}", tags)


def _resume_facts(page: Page, resume: Resume, limit: int) -> list[tuple[str, str]]:
    newer, left_out = shown(resume.passed_over, limit)
    lines = [_one_line(f"#{one.id} step {one.step} is {one.state}: {one.reason}") for one in newer]
    if left_out:
        lines.append(f"and {left_out} more: ckptfmt ls --all")
    problem = "" if resume.problem is None else page.paragraph(f"it cannot be read: {resume.problem.message}", "red")
    return [
        ("why", resume.reason),
        ("proof", resume.proof or ""),
        ("PROBLEM", problem),
        ("not taken", "\n".join(lines)),
    ]


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _holder_text(view: RunView, now: datetime) -> str:
    if view.holder is None:
        return "nobody"
    held = view.holder
    step = "" if held.last_step is None else f", at step {held.last_step}"
    lag = "" if view.lag_steps is None else f", {q.count(view.lag_steps, 'step')} ahead of the last commit"
    return f"{style(f'{held.host}:{held.pid}', 'yellow')} ({held.kind}), since {q.age(held.since, now)}{step}{lag}"


def _space_text(space: RunSpace) -> str:
    size = "" if space.committed_bytes is None else f" in {q.size(space.committed_bytes)}"
    parts = [f"{q.count(space.committed_generations, 'committed generation')}{size}"]
    if space.in_flight_generations:
        parts.append(f"{space.in_flight_generations} in flight")
    if space.reclaimable_generations:
        # What a killed process wrote nobody reported: then gc itself tells how much it is.
        freed = f"{q.size(space.reclaimable_bytes)}: " if space.reclaimable_bytes else ""
        parts.append(f"{space.reclaimable_generations} failed or retired ({freed}ckptfmt gc)")
    if space.deleted_generations:
        parts.append(f"{space.deleted_generations} deleted")
    return ", ".join(parts)


def _figures_text(saves: SaveFigures) -> str:
    if not saves.saves or saves.commit_seconds is None:
        return ""
    return (
        f"stall {q.duration(saves.stall_seconds)} (at most {q.duration(saves.stall_seconds_max)}), committed after "
        f"{q.duration(saves.commit_seconds)} (at most {q.duration(saves.commit_seconds_max)}); last {saves.saves}"
    )


def _metadata_text(metadata: Any) -> str:
    if isinstance(metadata, dict):
        return c.cut(", ".join(f"{key} = {value}" for key, value in metadata.items()), 400)
    return c.cut(str(metadata), 400)


def contents_heading(page: Page, name: str, contents: c.Contents) -> None:
    dtypes = ", ".join(f"{dtype} {q.size(total.nbytes)}" for dtype, total in list(contents.dtypes.items())[:4])
    tied = f" ({q.count(contents.aliases, 'more name')} for tied ones)" if contents.aliases else ""
    holds = f"holds {q.count(contents.tensors, 'tensor')}{tied}, {q.size(contents.nbytes)}"
    page.line(style(name, "bold"), f" {holds}", f": {dtypes}" if dtypes else "")
