"""Lists of runs and of generations."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from ckptfmt import overview
from ckptfmt.cli import quantities as q
from ckptfmt.cli.output import Page, style
from ckptfmt.cli.places import Place
from ckptfmt.engine.reports import GenerationInfo, Report, RunInfo
from ckptfmt.errors import InvalidInput

_STATE_STYLES = {"committed": "green", "aborted": "red", "writing": "yellow", "durable": "yellow"}


@dataclass(frozen=True)
class RunList(Report):
    """All runs of a repository."""

    report: str
    url: str
    read_by: str
    runs: tuple[RunInfo, ...]


@dataclass(frozen=True)
class UnderWay(Report):
    """How far the ranks of a generation are that is being saved."""

    generation_id: int
    ranks: int
    staged: int
    """Ranks that have staged, and those of them that are durable."""
    durable: int
    staged_bytes: int
    replicated_bytes: int
    """Of the staged bytes, on the durable tier."""


@dataclass(frozen=True)
class GenerationList(Report):
    """Generations of one run, newest commit first."""

    report: str
    url: str
    read_by: str
    run: str
    generations: tuple[GenerationInfo, ...]
    more: bool
    """Older ones were left out by ``--limit``."""
    under_way: tuple[UnderWay, ...]
    """How far those are that are being saved."""


def list_runs(place: Place) -> RunList:
    return RunList("runs", place.url, place.read_by, tuple(overview.runs(place.site)))


def list_generations(place: Place, *, every: bool, limit: int | None) -> GenerationList:
    run = place.reference.run
    if run is None:
        raise InvalidInput(f"{place.url}: name a run")
    if place.reference.at is not None:
        raise InvalidInput(f"{place.url}#{run}@{place.reference.at}: `ls` lists a run; `ckptfmt inspect` shows one")
    more = None if limit is None else limit + 1
    found = overview.generations(place.site, run=run, state=None if every else "committed", limit=more)
    return GenerationList(
        report="generations",
        url=place.url,
        read_by=place.read_by,
        run=run,
        generations=tuple(found[:limit]),
        more=limit is not None and len(found) > limit,
        under_way=tuple(_under_way(place, info) for info in found[:limit] if info.state == "writing"),
    )


def _under_way(place: Place, info: GenerationInfo) -> UnderWay:
    ranks = place.site.sql().ranks(info.id)
    return UnderWay(
        generation_id=info.id,
        ranks=len(ranks),
        staged=sum(rank.staged_bytes is not None for rank in ranks),
        durable=sum(rank.state == "durable" for rank in ranks),
        staged_bytes=sum(rank.staged_bytes or 0 for rank in ranks),
        replicated_bytes=sum(rank.replicated_bytes or 0 for rank in ranks),
    )


def show_runs(page: Page, report: RunList, now: datetime) -> None:
    if not report.runs:
        page.line("no runs")
        return
    rows = []
    for run in report.runs:
        latest = run.latest
        rows.append(
            (
                style(run.name, "bold"),
                f"#{latest.id}" if latest else q.ABSENT,
                str(latest.step) if latest else q.ABSENT,
                q.age(latest.committed_at, now) if latest else q.ABSENT,
                f"{run.committed:,}",
                q.size(run.nbytes) if report.read_by == "catalog" else q.ABSENT,
                str(run.in_flight or q.ABSENT),
                style(run.holder, "yellow") if run.holder else q.ABSENT,
            )
        )
    page.table(("RUN", ">LATEST", ">STEP", ">COMMITTED", ">GENERATIONS", ">SIZE", ">IN FLIGHT", "HELD BY"), rows)


def show_generations(page: Page, report: GenerationList, now: datetime, *, every: bool) -> None:
    if not report.generations:
        page.line(f"run {report.run}: no generations" if every else f"run {report.run}: none is committed; all: --all")
        return
    generation_table(page, report.generations, now)
    for one in report.under_way:
        copied = ""
        if one.staged:
            copied = f"; {one.staged} staged, {q.size(one.replicated_bytes)} of {q.size(one.staged_bytes)} copied"
        page.line(f"#{one.generation_id}: {one.durable} of {q.count(one.ranks, 'rank')} durable{copied}")
    if report.more:
        page.line(style(f"... and older ones: --limit {2 * len(report.generations)}, or --limit 0 for all", "dim"))


def generation_table(page: Page, generations: tuple[GenerationInfo, ...], now: datetime, indent: int = 0) -> None:
    rows = [
        (
            f"#{info.id}",
            str(info.step),
            state_text(info),
            q.size(info.nbytes),
            q.age(info.committed_at or info.created_at, now),
            q.duration(info.stall_seconds),
            ", ".join(info.tags) or q.ABSENT,
            note_text(info),
        )
        for info in generations
    ]
    page.table((">ID", ">STEP", "STATE", ">SIZE", ">AGE", ">STALL", "TAGS", ""), rows, indent)


def state_text(info: GenerationInfo) -> str:
    return style(info.state, _STATE_STYLES.get(info.state, "dim"))


def note_text(info: GenerationInfo) -> str:
    """What else matters about a generation, on one line: its marks, quarantined, why it was aborted."""
    notes = [marks_text(info)] if marks_text(info) else []
    if info.quarantine_reason is not None:
        notes.append(style(f"quarantined: {info.quarantine_reason}", "red"))
    if info.abort_reason is not None:
        notes.append(abort_text(info))
    return "; ".join(notes)


def marks_text(info: GenerationInfo) -> str:
    """Whether it is pinned, and without proof."""
    marks = ["pinned"] if info.pinned else []
    return "; ".join([*marks, style("proof pending", "yellow")] if info.proof_pending else marks)


def abort_text(info: GenerationInfo) -> str:
    """In which stage, on which rank and why it was aborted; empty if it was not."""
    if info.abort_reason is None:
        return ""
    rank = "" if info.abort_rank is None else f" on rank {info.abort_rank}"
    return f"{info.abort_stage or 'aborted'}{rank}: {info.abort_reason}"
