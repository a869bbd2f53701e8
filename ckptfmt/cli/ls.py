"""``ckptfmt ls``."""

from __future__ import annotations

from typing import Annotated

import typer

from ckptfmt.cli import options


def ls(
    url: options.Url,
    every: Annotated[bool, typer.Option("--all", help="Generations in every state, not only committed ones.")] = False,
    limit: Annotated[int, typer.Option(min=0, help="At most so many generations, newest first; 0 for all.")] = 100,
    catalog: options.Catalog = None,
    storage_option: options.StorageOption = None,
    as_json: options.Json = False,
) -> None:
    """List runs (URL), or the generations of a run (URL#run)."""
    from ckptfmt.cli import listing
    from ckptfmt.cli.output import emit
    from ckptfmt.cli.places import opened_place

    with opened_place(url, catalog=catalog, storage_option=storage_option) as place:
        place.require_repository()
        if place.reference.run is None:
            runs = listing.list_runs(place)
            emit(runs, lambda page: listing.show_runs(page, runs, place.now()), as_json=as_json)
        else:
            found = listing.list_generations(place, every=every, limit=limit or None)
            emit(found, lambda page: listing.show_generations(page, found, place.now()), as_json=as_json)
