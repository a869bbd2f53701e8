"""Settle what a crash left: commit what is complete, prove what is committed, fail the rest.

Committed data is never touched, nor what a live launch is saving. The next launch of a run does the same by itself.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from ckptfmt.cli import options


def configure(parser: ArgumentParser) -> None:
    options.add_url(parser)
    parser.add_argument("--run", metavar="RUN", help="only this run; the same as URL#run")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done; change nothing")
    options.add_storage(parser)
    options.add_tiers(parser)
    options.add_output(parser)


def run(arguments: Namespace) -> int:
    from ckptfmt.cli import upkeep
    from ckptfmt.cli.output import emit
    from ckptfmt.cli.places import opened_place

    with opened_place(arguments, mode="r" if arguments.dry_run else "w") as place:
        report = upkeep.recover_runs(place, arguments.run, dry_run=arguments.dry_run)
        emit(report, lambda page: upkeep.show_recovered(page, report), as_json=arguments.as_json)
    return 0
