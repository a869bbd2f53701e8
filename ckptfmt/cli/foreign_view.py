"""What a checkpoint of another tool holds, and what can be said of its bytes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import xxhash

from ckptfmt.cli import quantities as q
from ckptfmt.cli.contents import DtypeTotal, cut
from ckptfmt.cli.output import Page, style
from ckptfmt.cli.resume import problem_of
from ckptfmt.engine.reports import Problem, Report
from ckptfmt.errors import BackendError, FormatError, InvalidInput, NotFound
from ckptfmt.exchange.foreign import KINDS, Foreign, open_foreign
from ckptfmt.exchange.pieces import SourceTensor

LINES = 40
NO_CHECKSUMS = (
    "no checksums stored: all of it was read, but nobody can tell whether these are the bytes that were written; "
    "`ckptfmt import` gives them digests from now on"
)


@dataclass(frozen=True)
class ForeignFile(Report):
    """One file that the checkpoint consists of."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class ForeignLine(Report):
    """One tensor. ``digest`` is that of its bytes in C order; None unless it was asked for by name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    boxes: int
    file: str
    digest: str | None


@dataclass(frozen=True)
class ForeignView(Report):
    """A checkpoint of another tool. ``lines`` are empty unless tensors were asked for."""

    report: str
    path: str
    kind: str
    files: tuple[ForeignFile, ...]
    nbytes: int
    tensors: int
    dtypes: Mapping[str, DtypeTotal]
    values: tuple[str, ...]
    metadata: Mapping[str, str]
    lines: tuple[ForeignLine, ...]


@dataclass(frozen=True)
class ForeignVerification(Report):
    """What verify found. ``ok`` is never true, since nothing tells what the bytes should be."""

    report: str
    path: str
    kind: str
    ok: bool
    nbytes: int
    seconds: float
    problems: tuple[Problem, ...]


# -- inspect ------------------------------------------------------------------------------------------
def foreign_view(path: Path, *, tensor: str | None, every: bool) -> ForeignView:
    with open_foreign(path) as foreign:
        if tensor is not None:
            lines: tuple[ForeignLine, ...] = (_line(_named(foreign, tensor), digest=True),)
        else:
            lines = tuple(_line(one) for one in foreign.tensors.values()) if every else ()
        return ForeignView(
            report="foreign",
            path=str(foreign.path),
            kind=foreign.kind,
            files=tuple(ForeignFile(file.name, file.nbytes) for file in foreign.files),
            nbytes=foreign.nbytes,
            tensors=len(foreign.tensors),
            dtypes=_totals(foreign),
            values=tuple(foreign.values),
            metadata=foreign.metadata,
            lines=lines,
        )


def _named(foreign: Foreign, name: str) -> SourceTensor:
    found = foreign.tensors.get(name)
    if found is None:
        raise NotFound(
            f"{foreign.path} has no tensor {name!r}; `ckptfmt inspect --tensors` lists all {len(foreign.tensors)}"
        )
    return found


def _line(tensor: SourceTensor, *, digest: bool = False) -> ForeignLine:
    found = None
    if digest:
        state = xxhash.xxh3_128()
        for piece in tensor.pieces():
            state.update(piece)
        found = state.hexdigest()
    return ForeignLine(tensor.name, tensor.dtype, tensor.shape, tensor.nbytes, len(tensor.boxes), tensor.file, found)


def _totals(foreign: Foreign) -> dict[str, DtypeTotal]:
    found: dict[str, list[int]] = {}
    for tensor in foreign.tensors.values():
        found.setdefault(tensor.dtype, []).append(tensor.nbytes)
    totals = {name: DtypeTotal(len(sizes), sum(sizes)) for name, sizes in found.items()}
    return dict(sorted(totals.items(), key=lambda item: (-item[1].nbytes, item[0])))


def show_foreign(page: Page, view: ForeignView) -> None:
    page.heading(f"{view.path}: {KINDS[view.kind]}")  # type: ignore[index]
    dtypes = ", ".join(f"{name} {q.size(total.nbytes)}" for name, total in view.dtypes.items())
    page.facts(
        [
            ("tensors", f"{view.tensors:,} in {q.size(view.nbytes)}{f': {dtypes}' if dtypes else ''}"),
            ("values", f"{len(view.values):,}" if view.values else ""),
            (
                "files",
                f"{len(view.files):,} of {q.size(sum(file.nbytes for file in view.files))}" if view.files else "",
            ),
            ("metadata", "\n".join(f"{key} = {cut(text)}" for key, text in view.metadata.items())),
            ("checksums", "none stored; `ckptfmt import` makes it a verified generation"),
        ]
    )
    if view.lines:
        page.blank()
        rows = [(one.name, one.dtype, q.shape(one.shape), q.size(one.nbytes), one.file) for one in view.lines]
        page.table(("TENSOR", "DTYPE", "SHAPE", ">SIZE", "FILE"), rows, indent=2)
    if len(view.lines) == 1 and view.lines[0].digest is not None:
        page.facts([("xxh3-128", view.lines[0].digest)])


# -- verify -------------------------------------------------------------------------------------------
def verify_foreign(path: Path, *, every: bool) -> ForeignVerification:
    """Read all of it. What cannot be opened at all raises."""
    if every:
        raise InvalidInput(f"--all verifies a run or a repository, and {path} is neither: leave it out")
    began = time.perf_counter()
    with open_foreign(path) as foreign:
        problems: list[Problem] = []
        nbytes = 0
        for read in (
            *(partial(_read, tensor) for tensor in foreign.tensors.values()),
            partial(_look_at_values, foreign),
        ):
            try:
                nbytes += read()
            except (FormatError, NotFound, BackendError) as error:
                problems.append(problem_of(error))
        problems.append(Problem("unverifiable", str(foreign.path), NO_CHECKSUMS))
        seconds = time.perf_counter() - began
        return ForeignVerification(
            "verify.foreign", str(foreign.path), foreign.kind, False, nbytes, seconds, tuple(problems)
        )


def _read(tensor: SourceTensor) -> int:
    return sum(piece.nbytes for piece in tensor.pieces())


def _look_at_values(foreign: Foreign) -> int:
    foreign.value_texts()
    return 0


def show_foreign_verification(page: Page, report: ForeignVerification) -> None:
    page.heading(f"{report.path}: {KINDS[report.kind]}")  # type: ignore[index]
    page.facts([("read", f"{q.size(report.nbytes)} in {q.duration(report.seconds)}")])
    for problem in report.problems:
        page.blank()
        page.line(style(problem.kind, "red"))
        page.facts([("tensor", problem.tensor or ""), ("message", page.paragraph(problem.message))])
