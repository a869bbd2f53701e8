"""Make a generation readable for other tools.

--safetensors FOLDER: its tensors as safetensors files with an index, as Hugging Face's tools write and read them.
--kerchunk FILE.json: references into the packs, which zarr and xarray open through fsspec where there is no ckptfmt.
--ocdbt: a database beside the packs, in the generation's folder, which TensorStore opens where there is no ckptfmt.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any

from ckptfmt.cli import options
from ckptfmt.errors import InvalidInput

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from ckptfmt.cli.output import Page
    from ckptfmt.engine.keep.verify import Progress
    from ckptfmt.engine.opened import Opened
    from ckptfmt.exchange.kerchunk import KerchunkExport
    from ckptfmt.exchange.ocdbt_export import OcdbtExport
    from ckptfmt.exchange.safetensors_export import SafetensorsExport

_OF_SAFETENSORS = ("keys", "exclude", "subtree", "dtype", "rank", "file_bytes")


def configure(parser: ArgumentParser) -> None:
    options.add_url(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--safetensors", metavar="FOLDER", help="write model.safetensors, or several files and an index")
    what.add_argument("--kerchunk", metavar="FILE", help="write references as JSON; nothing is verified through them")
    what.add_argument(
        "--ocdbt",
        action="store_true",
        help="write an OCDBT database into the repository; nothing is verified through it",
    )
    chosen = parser.add_argument_group("with --safetensors")
    chosen.add_argument("--keys", action="append", metavar="PATTERN", help="only tensors that match; may be repeated")
    chosen.add_argument("--exclude", action="append", metavar="PATTERN", help="no tensors that match; may be repeated")
    chosen.add_argument("--subtree", metavar="PATH", help="only what is below PATH, which is taken off the names")
    chosen.add_argument("--dtype", help="convert tensors of floating point: bfloat16, float16, float32, ...")
    chosen.add_argument("--rank", type=int, help="of what ranks kept for themselves, that of this one")
    chosen.add_argument("--file-bytes", type=int, metavar="BYTES", help="at most so many in a file (default 5 GiB)")
    references = parser.add_argument_group("with --kerchunk")
    references.add_argument(
        "--root", metavar="URL", help="how readers reach the repository, if not by the URL that is given here"
    )
    options.add_storage(parser)
    options.add_tiers(parser)
    options.add_output(parser)


def run(arguments: Namespace) -> int:
    from ckptfmt.cli.places import opened_place

    if arguments.safetensors is None:
        _require_unset(arguments, _OF_SAFETENSORS, "--safetensors")
    if arguments.kerchunk is None:
        _require_unset(arguments, ("root",), "--kerchunk")
    with opened_place(arguments) as place:
        opened = place.open()
        if arguments.kerchunk is not None:
            _kerchunk(opened, arguments)
        elif arguments.ocdbt:
            _ocdbt(opened, arguments)
        else:
            _safetensors(opened, arguments)
    return 0


def _require_unset(arguments: Namespace, names: tuple[str, ...], belongs_to: str) -> None:
    given = [name for name in names if getattr(arguments, name) is not None]
    if given:
        raise InvalidInput(f"--{given[0].replace('_', '-')} belongs to {belongs_to}: leave it out")


def _bar(opened: Opened, arguments: Namespace) -> AbstractContextManager[Progress | None]:
    from ckptfmt.cli.progress import progress_bars

    return progress_bars(arguments)(f"exporting #{opened.info.id}")


def _kerchunk(opened: Opened, arguments: Namespace) -> None:
    from pathlib import Path

    from ckptfmt.cli.output import emit
    from ckptfmt.exchange.kerchunk import export_kerchunk

    with _bar(opened, arguments) as progress:
        report = export_kerchunk(opened, Path(arguments.kerchunk), root=arguments.root, progress=progress)
    emit(report, lambda page: show(page, report), as_json=arguments.as_json)


def _ocdbt(opened: Opened, arguments: Namespace) -> None:
    from ckptfmt.cli.output import emit
    from ckptfmt.exchange.ocdbt_export import export_ocdbt

    with _bar(opened, arguments) as progress:
        report = export_ocdbt(opened, progress=progress)
    emit(report, lambda page: show_ocdbt(page, report), as_json=arguments.as_json)


def _safetensors(opened: Opened, arguments: Namespace) -> None:
    from pathlib import Path

    from ckptfmt.cli.output import emit
    from ckptfmt.exchange.safetensors_export import Chosen, export_safetensors

    chosen = Chosen(arguments.keys, arguments.exclude, arguments.subtree, arguments.dtype, arguments.rank)
    limit: dict[str, Any] = {} if arguments.file_bytes is None else {"file_bytes_max": arguments.file_bytes}
    with _bar(opened, arguments) as progress:
        report = export_safetensors(opened, Path(arguments.safetensors), chosen, progress=progress, **limit)
    emit(report, lambda page: show_safetensors(page, report), as_json=arguments.as_json)


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


def show_ocdbt(page: Page, report: OcdbtExport) -> None:
    from ckptfmt.cli import quantities as q

    page.heading(f"generation #{report.generation_id} of run {report.run!r}, step {report.step:,}")
    place = f'"base": "{report.base}"'
    if report.manifest != report.base:
        place += f', "manifest": "{report.manifest}"'
    kvstore = f'{{"driver": "ocdbt", {place}, "path": "NAME/"}}'
    as_bytes = f"{q.count(len(report.as_bytes), 'array')} of types that TensorStore has no word for"
    page.facts(
        [
            ("database", f"{report.manifest}: {report.references:,} chunks of {q.count(report.arrays, 'array')}"),
            ("copied", f"{q.size(report.copied_nbytes)} beside it" if report.copied_nbytes else ""),
            ("as bytes", as_bytes if report.as_bytes else ""),
            ("to open", f'tensorstore.open({{"driver": "zarr3", "kvstore": {kvstore}}}, read=True)'),
        ]
    )


def show_safetensors(page: Page, report: SafetensorsExport) -> None:
    from ckptfmt.cli import quantities as q

    page.heading(f"generation #{report.generation_id} of run {report.run!r}, step {report.step:,}")
    as_bytes = f"{q.count(len(report.as_bytes), 'tensor')} of types that safetensors has no word for"
    page.facts(
        [
            ("folder", f"{report.folder}: {', '.join(report.files[:8])}{', ...' if len(report.files) > 8 else ''}"),
            ("holds", f"{q.count(report.tensors, 'tensor')}, {q.size(report.nbytes)}"),
            ("cast", q.count(len(report.cast), "tensor") if report.cast else ""),
            ("tied", f"{q.count(len(report.tied), 'name')}, written under another one" if report.tied else ""),
            ("as bytes", as_bytes if report.as_bytes else ""),
        ]
    )
