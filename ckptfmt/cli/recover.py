"""``ckptfmt recover``."""

from __future__ import annotations

from typing import Annotated

import typer

from ckptfmt.cli import options


def recover(
    url: options.Url,
    run: Annotated[str | None, typer.Option(help="Only this run; the same as URL#run.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done; change nothing.")] = False,
    catalog: options.Catalog = None,
    storage_option: options.StorageOption = None,
    as_json: options.Json = False,
) -> None:
    """Settle what a crash left: commit what is complete, prove what is committed, fail the rest.

    Committed data is never touched, nor what a live launch is saving. The next launch of a run does the same by itself.
    """
    from ckptfmt.cli import upkeep
    from ckptfmt.cli.output import emit
    from ckptfmt.cli.places import opened_place

    with opened_place(url, catalog=catalog, storage_option=storage_option, mode="r" if dry_run else "w") as place:
        report = upkeep.recover_runs(place, run, dry_run=dry_run)
        emit(report, lambda page: upkeep.show_recovered(page, report), as_json=as_json)
