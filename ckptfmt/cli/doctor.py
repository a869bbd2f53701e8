"""Try out what a place and this machine can do, and say what follows and how to improve it.

Works on a folder that is not there yet: the nearest one above it is tried. Nothing stays behind. The exit code is 14
if saving would fail there.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from ckptfmt.cli import options

if TYPE_CHECKING:
    from ckptfmt.cli.output import Page
    from ckptfmt.doctor.report import Diagnosis

_STYLES = {"good": ("green",), "slow": ("yellow",), "bad": ("bold", "red"), "note": ("dim",)}


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="a folder for a repository (path or file://...), there or not")
    options.add_output(parser)


def run(arguments: Namespace) -> int:
    from ckptfmt.cli.exit_codes import BACKEND, OK
    from ckptfmt.cli.local_folder import local_folder, nearest_folder
    from ckptfmt.cli.output import emit
    from ckptfmt.doctor.examine import examine

    wanted = local_folder(arguments.url, "doctor")
    report = examine(wanted.as_uri(), wanted, nearest_folder(wanted))
    emit(report, lambda page: show(page, report), as_json=arguments.as_json)
    return OK if report.ok else BACKEND


def show(page: Page, report: Diagnosis) -> None:
    from ckptfmt.cli.output import style

    page.heading(f"{report.url}, tried in {report.folder}")
    for one in report.findings:
        page.line(style(f"{one.status:<5}", *_STYLES[one.status]), style(f"{one.name:<19}", "bold"), one.found)
        page.facts([("", page.paragraph(one.consequence)), ("", _fix(page, one.fix))], indent=22)
    page.blank()
    if not report.ok:
        page.line(style("saving would fail here: see what is marked bad", "bold", "red"))
    else:
        improvable = sum(one.status == "slow" for one in report.findings)
        rest = f"; {improvable} marked slow can be improved" if improvable else ""
        page.line(style(f"saving works here{rest}", "green"))


def _fix(page: Page, fix: str | None) -> str:
    return "" if fix is None else page.paragraph(f"fix: {fix}", "cyan")
