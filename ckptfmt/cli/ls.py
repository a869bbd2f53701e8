"""List runs (URL), or the generations of a run (URL#run)."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from ckptfmt.cli import options


def configure(parser: ArgumentParser) -> None:
    options.add_url(parser)
    parser.add_argument(
        "--all", dest="every", action="store_true", help="generations in every state, not only committed ones"
    )
    parser.add_argument(
        "--limit",
        type=options.count_or_all,
        default=100,
        metavar="N",
        help="at most so many generations, newest first; 0 for all (default: 100)",
    )
    options.add_storage(parser)
    options.add_output(parser)


def run(arguments: Namespace) -> int:
    from ckptfmt.cli import listing
    from ckptfmt.cli.output import emit
    from ckptfmt.cli.places import opened_place

    with opened_place(arguments) as place:
        place.require_repository()
        if place.reference.run is None:
            runs = listing.list_runs(place)
            emit(runs, lambda page: listing.show_runs(page, runs, place.now()), as_json=arguments.as_json)
        else:
            every = bool(arguments.every)
            found = listing.list_generations(place, every=every, limit=arguments.limit or None)
            emit(
                found,
                lambda page: listing.show_generations(page, found, place.now(), every=every),
                as_json=arguments.as_json,
            )
    return 0
