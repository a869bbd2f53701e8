"""Show what changed between two generations, by digest and without reading any tensor's bytes.

Either may also be a checkpoint of another tool (see `ckptfmt inspect --help`): then all bytes of both are read, of a
generation from the nearest of the tiers that the catalog knows.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from ckptfmt.cli import options


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("url", metavar=options.REFERENCE, help="the one generation")
    parser.add_argument("other", metavar="OTHER", help="the other: a reference, or '@id' or '#run@id' of the same one")
    parser.add_argument("--unchanged", action="store_true", help="list equal tensors as well")
    options.add_storage(parser)
    options.find_tiers(parser)
    options.add_output(parser)


def run(arguments: Namespace) -> int:
    from ckptfmt.cli import comparison
    from ckptfmt.cli.foreign_place import foreign_path
    from ckptfmt.cli.output import emit
    from ckptfmt.cli.places import opened_place

    other = arguments.other
    if foreign_path(arguments.url) is None:
        other = comparison.absolute(other, arguments.url)
    if foreign_path(arguments.url) is not None or foreign_path(other) is not None:
        return _foreign(other, arguments)
    with opened_place(arguments) as old, opened_place(arguments, url=other) as new:
        report = comparison.compare(old.open(), new.open())
    emit(
        report,
        lambda page: comparison.show_comparison(page, report, unchanged=arguments.unchanged),
        as_json=arguments.as_json,
    )
    return 0


def _foreign(other: str, arguments: Namespace) -> int:
    from ckptfmt.cli import foreign_comparison as f
    from ckptfmt.cli.output import emit

    report = f.compare_foreign(arguments, other)
    emit(
        report,
        lambda page: f.show_foreign_comparison(page, report, unchanged=arguments.unchanged),
        as_json=arguments.as_json,
    )
    return 0
