"""One generation in full, as a page for people."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from ckptfmt.cli import contents as c
from ckptfmt.cli import quantities as q
from ckptfmt.cli.generation_view import GenerationView, RankView, TensorLine
from ckptfmt.cli.history import history_table
from ckptfmt.cli.listing import abort_text, marks_text, state_text
from ckptfmt.cli.output import Page, style
from ckptfmt.cli.run_view import contents_heading


def show_generation(page: Page, view: GenerationView, now: datetime) -> None:
    info = view.generation
    marks = marks_text(info)
    page.line(
        style(f"generation #{info.id} of run {info.run}, step {info.step}", "bold"),
        " is ",
        state_text(info),
        f" ({marks})" if marks else "",
    )
    page.facts(_facts(page, view, now))
    if view.ranks and (len(view.ranks) > 1 or info.state != "committed"):
        _show_ranks(page, view.ranks)
    if view.history:
        page.blank()
        page.heading("History")
        history_table(page, view.history, generations=False)
    if view.packs:
        page.blank()
        page.heading("Packs")
        rows = [(pack.name, str(pack.rank), q.size(pack.nbytes), pack.generation or "") for pack in view.packs]
        page.table(("NAME", ">RANK", ">SIZE", ""), rows, indent=2)
    if view.contents is not None:
        page.blank()
        contents_heading(page, "State", view.contents)
        c.show_contents(page, view.contents)
    if view.tensors:
        page.blank()
        page.heading("Tensors" if not view.tensors_left_out else "Largest tensors")
        _show_tensors(page, view.tensors)
        if view.tensors_left_out:
            page.line(style(f"  and {q.count(view.tensors_left_out, 'more tensor')}: --tensors", "dim"))


def _facts(page: Page, view: GenerationView, now: datetime) -> list[tuple[str, str]]:
    info, times = view.generation, view.timings
    parent = info.parent_key or "none: a first one"
    if view.parent_id is not None:
        parent = f"#{view.parent_id} ({parent})"
    timed = [
        f"{name} {q.duration(seconds)}"
        for name, seconds in (
            ("stall", times.stall),
            ("write", times.write),
            ("staged after", times.staged),
            ("durable after", times.durable),
            ("committed after", times.commit),
            ("proven after", times.proof),
        )
        if seconds is not None
    ]
    when = "" if info.committed_at is None else f"{q.moment(info.committed_at)} ({q.age(info.committed_at, now)})"
    began = "" if info.created_at is None else f"{q.moment(info.created_at)} ({q.age(info.created_at, now)})"
    problem = "" if view.problem is None else page.paragraph(f"it cannot be read: {view.problem.message}", "red")
    metadata = "" if view.metadata in (None, {}) else c.cut(str(view.metadata), 400)
    return [
        ("aborted", page.paragraph(abort_text(info), "red")),
        ("quarantined", page.paragraph(info.quarantine_reason or "", "red")),
        ("key", info.key),
        ("folder", view.url),
        ("parent", parent if info.state == "committed" else ""),
        ("began", began if not when else ""),
        ("committed", f"{when}, commit {info.commit_seq} of the run" if when else ""),
        ("tags", ", ".join(info.tags)),
        ("ranks", "" if info.world_size is None else str(info.world_size)),
        ("written by", view.library or ""),
        ("timings", ", ".join(timed)),
        ("metadata", metadata),
        ("PROBLEM", problem),
    ]


def _show_ranks(page: Page, ranks: Sequence[RankView]) -> None:
    page.blank()
    page.heading("Ranks")
    staged = any(rank.staged_bytes for rank in ranks)
    rows = [
        (
            str(rank.rank),
            rank.state,
            q.size(rank.nbytes),
            q.duration(rank.stall_seconds),
            q.duration(rank.write_seconds),
            q.rate(rank.nbytes, rank.write_seconds),
            *([q.duration(rank.staged_seconds), _copied(rank)] if staged else []),
            rank.error or "",
        )
        for rank in ranks
    ]
    stage = (">STAGED IN", ">COPIED") if staged else ()
    page.table((">RANK", "STATE", ">SIZE", ">STALL", ">WRITE", ">RATE", *stage, ""), rows, indent=2)


def _copied(rank: RankView) -> str:
    """How much of what is staged the durable tier holds."""
    if not rank.staged_bytes:
        return q.ABSENT
    return f"{100 * (rank.replicated_bytes or 0) // rank.staged_bytes} %"


def _show_tensors(page: Page, tensors: Sequence[TensorLine]) -> None:
    rows = [
        (
            tensor.name,
            tensor.dtype,
            q.shape(tensor.shape),
            q.size(tensor.nbytes),
            _held(tensor),
        )
        for tensor in tensors
    ]
    page.table(("NAME", "DTYPE", "SHAPE", ">SIZE", ""), rows, indent=2)


def _held(tensor: TensorLine) -> str:
    """By which ranks, unless all of them hold it alike."""
    if tensor.rank >= 0:
        return f"rank {tensor.rank}"
    boxes = "" if tensor.boxes == 1 else f", {q.count(tensor.boxes, 'box', 'boxes')}"
    return "" if tensor.kind == "replicated" and not boxes else f"{tensor.kind}{boxes}"
