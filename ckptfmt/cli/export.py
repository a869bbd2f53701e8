"""Make a generation readable for other tools, without copying its tensors where that can be had.

--kerchunk FILE.json: references into the packs, which zarr and xarray open through fsspec where there is no ckptfmt.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from ckptfmt.cli import options

if TYPE_CHECKING:
    from ckptfmt.cli.output import Page
    from ckptfmt.exchange.kerchunk import KerchunkExport


def configure(parser: ArgumentParser) -> None:
    options.add_url(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--kerchunk", metavar="FILE", help="write references as JSON; nothing is verified through them")
    parser.add_argument(
        "--root", metavar="URL", help="how readers reach the repository, if not by the URL that is given here"
    )
    options.add_storage(parser)
    options.add_output(parser)


def run(arguments: Namespace) -> int:
    from pathlib import Path

    from ckptfmt.cli.output import emit
    from ckptfmt.cli.places import opened_place
    from ckptfmt.exchange.kerchunk import export_kerchunk

    with opened_place(arguments) as place:
        report = export_kerchunk(place.open(), Path(arguments.kerchunk), root=arguments.root)
        emit(report, lambda page: show(page, report), as_json=arguments.as_json)
    return 0


def show(page: Page, report: KerchunkExport) -> None:
    from ckptfmt.cli import quantities as q

    page.heading(f"generation #{report.generation_id} of run {report.run!r}, step {report.step:,}")
    page.facts(
        [
            ("references", f"{report.file}: {report.references:,} to {q.count(report.arrays, 'array')}"),
            ("copied", f"{q.size(report.copied_nbytes)} into {report.side_file}" if report.side_file else ""),
            (
                "as bytes",
                f"{q.count(len(report.as_bytes), 'array')} of types that not every Zarr knows"
                if report.as_bytes
                else "",
            ),
            ("to open", f'zarr.open_group("reference://", storage_options={{"fo": "{report.file}"}}, mode="r")'),
        ]
    )
