"""Read every byte and compare it with its digest; exit code 12 if anything is wrong.

URL: the latest committed generation of every run. URL#run: of this run. URL#run@id: this one. --all: all of them.
Every tier is read: the durable one, and stage and replicas as far as they hold it.
Checkpoints of other tools are read, too, but never pass: they have no checksums stored.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from ckptfmt.cli import options

if TYPE_CHECKING:
    from pathlib import Path


def configure(parser: ArgumentParser) -> None:
    options.add_url(parser)
    parser.add_argument(
        "--all", dest="every", action="store_true", help="every committed generation, not only the latest"
    )
    options.add_storage(parser)
    options.add_tiers(parser)
    options.add_output(parser)


def run(arguments: Namespace) -> int:
    from ckptfmt.cli.foreign_place import foreign_path

    if (path := foreign_path(arguments.url)) is not None:
        return _foreign(path, arguments)
    from ckptfmt.cli import verification
    from ckptfmt.cli.exit_codes import CORRUPT, OK
    from ckptfmt.cli.output import emit
    from ckptfmt.cli.places import opened_place
    from ckptfmt.cli.progress import progress_bars

    with opened_place(arguments) as place:
        report = verification.verify_place(place, progress_bars(arguments), every=arguments.every)
        emit(report, lambda page: verification.show_verification(page, report), as_json=arguments.as_json)
    return OK if report.ok else CORRUPT


def _foreign(path: Path, arguments: Namespace) -> int:
    from ckptfmt.cli import foreign_view as f
    from ckptfmt.cli.exit_codes import CORRUPT
    from ckptfmt.cli.output import emit

    report = f.verify_foreign(path, every=arguments.every)
    emit(report, lambda page: f.show_foreign_verification(page, report), as_json=arguments.as_json)
    return CORRUPT
