"""``ckptfmt verify``."""

from __future__ import annotations

from typing import Annotated

import typer

from ckptfmt.cli import options


def verify(
    url: options.Url,
    every: Annotated[bool, typer.Option("--all", help="Every committed generation, not only the latest.")] = False,
    catalog: options.Catalog = None,
    storage_option: options.StorageOption = None,
    as_json: options.Json = False,
) -> int:
    """Read every byte and compare it with its digest; exit code 12 if anything is wrong.

    URL: the latest committed generation of every run. URL#run: of this run. URL#run@id: this one. --all: all of them.
    """
    from ckptfmt.cli import verification
    from ckptfmt.cli.exit_codes import CORRUPT, OK
    from ckptfmt.cli.output import emit
    from ckptfmt.cli.places import opened_place

    with opened_place(url, catalog=catalog, storage_option=storage_option) as place:
        report = verification.verify_place(place, every=every)
        emit(report, lambda page: verification.show_verification(page, report), as_json=as_json)
    return OK if report.ok else CORRUPT
