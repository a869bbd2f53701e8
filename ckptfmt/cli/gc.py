"""``ckptfmt gc``."""

from __future__ import annotations

from typing import Annotated

import typer

from ckptfmt.cli import options


def gc(
    url: options.Url,
    yes: Annotated[
        bool, typer.Option("--yes", help="Remove what the plan lists. Without it nothing is changed.")
    ] = False,
    catalog: options.Catalog = None,
    storage_option: options.StorageOption = None,
    as_json: options.Json = False,
) -> None:
    """Remove what failed and retired generations left on storage; shows the plan unless --yes is given."""
    from ckptfmt.cli import upkeep
    from ckptfmt.cli.output import emit
    from ckptfmt.cli.places import opened_place

    with opened_place(url, catalog=catalog, storage_option=storage_option, mode="w" if yes else "r") as place:
        report = upkeep.collect_garbage(place, dry_run=not yes)
        emit(report, lambda page: upkeep.show_collected(page, report), as_json=as_json)
