"""Remove what failed and retired generations left on storage; shows the plan unless --yes is given."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from ckptfmt.cli import options


def configure(parser: ArgumentParser) -> None:
    options.add_url(parser)
    parser.add_argument("--yes", action="store_true", help="remove what the plan lists; without it nothing is changed")
    options.add_storage(parser)
    options.add_tiers(parser)
    options.add_output(parser)


def run(arguments: Namespace) -> int:
    from ckptfmt.cli import upkeep
    from ckptfmt.cli.output import emit
    from ckptfmt.cli.places import opened_place

    with opened_place(arguments, mode="w" if arguments.yes else "r") as place:
        report = upkeep.collect_garbage(place, dry_run=not arguments.yes)
        emit(report, lambda page: upkeep.show_collected(page, report), as_json=arguments.as_json)
    return 0
