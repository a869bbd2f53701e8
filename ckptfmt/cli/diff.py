"""``ckptfmt diff``."""

from __future__ import annotations

from typing import Annotated

import typer

from ckptfmt.cli import options


def diff(
    old: Annotated[str, typer.Argument(metavar="URL#RUN@ID", help="The one generation.")],
    new: Annotated[
        str, typer.Argument(metavar="URL#RUN@ID", help="The other; '@id' or '#run@id' for the same repository.")
    ],
    unchanged: Annotated[bool, typer.Option("--unchanged", help="List equal tensors as well.")] = False,
    catalog: options.Catalog = None,
    storage_option: options.StorageOption = None,
    as_json: options.Json = False,
) -> None:
    """Show what changed between two generations, by digest and without reading any tensor's bytes."""
    from ckptfmt.cli import comparison
    from ckptfmt.cli.output import emit
    from ckptfmt.cli.places import opened_place

    with (
        opened_place(old, catalog=catalog, storage_option=storage_option) as one,
        opened_place(comparison.absolute(new, old), catalog=catalog, storage_option=storage_option) as other,
    ):
        report = comparison.compare(one.open(), other.open())
        emit(report, lambda page: comparison.show_comparison(page, report, unchanged=unchanged), as_json=as_json)
