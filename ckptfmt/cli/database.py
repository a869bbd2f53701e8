"""``ckptfmt db``: what the verbs do and print."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ckptfmt import connect
from ckptfmt.catalog import upgrade as schema
from ckptfmt.catalog.location import display
from ckptfmt.catalog.revision import HEAD
from ckptfmt.cli import quantities as q
from ckptfmt.cli.exit_codes import CATALOG, OK
from ckptfmt.cli.output import Page, emit, style
from ckptfmt.engine.governing import governing_claim
from ckptfmt.engine.marker import require_marker
from ckptfmt.engine.reports import Report
from ckptfmt.errors import InvalidInput
from ckptfmt.reference import parse_reference


@dataclass(frozen=True)
class Revision(Report):
    """``revision`` is the database's, ``expected`` this library's; before an upgrade it was ``was``."""

    report: str
    catalog: str
    revision: str | None
    expected: str
    was: str | None


@dataclass(frozen=True)
class Check(Report):
    report: str
    catalog: str
    revision: str | None
    ok: bool
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Backup(Report):
    report: str
    catalog: str
    file: str
    nbytes: int


def catalog_of(url: str, catalog: str | None) -> str:
    """The catalog to work on: the option, the URL itself if it is one, else the embedded one of a repository."""
    if catalog is not None:
        return catalog
    if url.partition(":")[0].partition("+")[0] in ("sqlite", "postgresql"):
        return url
    backend = connect.backend_for(parse_reference(url).url)
    try:
        require_marker(backend)
        found = connect.catalog_url(backend, governing_claim(backend), None, "r")
    finally:
        backend.close()
    if found is None:
        raise InvalidInput(f"{backend.url} has no embedded catalog; name the one that governs it: --catalog URL")
    return found


def upgrade(target: str, as_json: bool) -> int:
    was = schema.current(target)
    report = Revision("db.upgrade", display(target), schema.upgrade(target), HEAD, was)

    def show(page: Page) -> None:
        done = "was there already" if was == report.revision else f"upgraded from {was or 'nothing'}"
        page.line(f"{report.catalog}: revision {report.revision}, {done}")

    emit(report, show, as_json=as_json)
    return OK


def current(target: str, as_json: bool) -> int:
    revision = schema.current(target)
    report = Revision("db.current", display(target), revision, HEAD, revision)

    def show(page: Page) -> None:
        if revision == HEAD:
            note = style("as this ckptfmt expects", "green")
        else:
            note = style(f"this ckptfmt expects {HEAD}: see `ckptfmt db upgrade`", "yellow")
        page.line(f"{report.catalog}: revision {revision or 'none'}, ", note)

    emit(report, show, as_json=as_json)
    return OK


def check(target: str, as_json: bool) -> int:
    found = schema.check(target)
    report = Check("db.check", found.url, found.revision, not found.problems, found.problems)

    def show(page: Page) -> None:
        verdict = style("sound", "green") if report.ok else style(q.count(len(found.problems), "problem"), "red")
        page.line(f"{report.catalog}: revision {report.revision or 'none'}, ", verdict)
        for problem in found.problems:
            page.line(f"  {problem}")

    emit(report, show, as_json=as_json)
    return OK if report.ok else CATALOG


def backup(target: str, file: Path, as_json: bool) -> int:
    path = schema.backup(target, file)
    report = Backup("db.backup", display(target), str(path), path.stat().st_size)
    emit(
        report,
        lambda page: page.line(f"{report.catalog} copied to {report.file}, {q.size(report.nbytes)}"),
        as_json=as_json,
    )
    return OK
