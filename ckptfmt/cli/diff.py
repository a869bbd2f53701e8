"""Show what changed between two generations, by digest and without reading any tensor's bytes."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from ckptfmt.cli import options


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("url", metavar=options.REFERENCE, help="the one generation")
    parser.add_argument("other", metavar="OTHER", help="the other: a reference, or '@id' or '#run@id' of the same one")
    parser.add_argument("--unchanged", action="store_true", help="list equal tensors as well")
    options.add_storage(parser)
    options.add_output(parser)


def run(arguments: Namespace) -> int:
    from ckptfmt.cli import comparison
    from ckptfmt.cli.output import emit
    from ckptfmt.cli.places import opened_place

    other = comparison.absolute(arguments.other, arguments.url)
    with opened_place(arguments) as old, opened_place(arguments, url=other) as new:
        report = comparison.compare(old.open(), new.open())
    emit(
        report,
        lambda page: comparison.show_comparison(page, report, unchanged=arguments.unchanged),
        as_json=arguments.as_json,
    )
    return 0
