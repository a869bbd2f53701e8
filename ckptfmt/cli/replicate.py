"""Show what tiers lack, catch up, and repair what is damaged; shows the plan unless --yes is given.

URL, or URL#run: how far each replica is behind, and what waits on stages. --yes copies what replicas lack, from any
tier that has it whole; a --replica that is none yet becomes one. --repair looks for damage on all tiers, in the latest
generation of every run (URL#run: of this run, URL#run@id: in this one, --all: in all of them); with --yes it writes
good bytes under a new name beside what is damaged.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from ckptfmt.cli import options


def configure(parser: ArgumentParser) -> None:
    options.add_url(parser)
    parser.add_argument("--yes", action="store_true", help="copy, or repair; without it nothing is changed")
    parser.add_argument(
        "--repair", action="store_true", help="read every byte on all tiers, and repair what is damaged"
    )
    parser.add_argument("--all", dest="every", action="store_true", help="with --repair: every committed generation")
    parser.add_argument(
        "--bandwidth", type=options.positive, metavar="BYTES", help="bytes per second that copies take at most"
    )
    options.add_storage(parser)
    options.add_tiers(parser)
    options.add_output(parser)


def run(arguments: Namespace) -> int:
    from ckptfmt.cli import replication
    from ckptfmt.cli.output import emit
    from ckptfmt.cli.places import opened_place
    from ckptfmt.cli.progress import progress_bars

    with opened_place(arguments, mode="w" if arguments.yes else "r") as place:
        report = replication.replicate_place(
            place,
            progress_bars(arguments),
            yes=arguments.yes,
            repair=arguments.repair,
            every=arguments.every,
            bandwidth=arguments.bandwidth,
        )
        emit(report, lambda page: replication.show_replication(page, report), as_json=arguments.as_json)
    return replication.exit_code_of(report)
