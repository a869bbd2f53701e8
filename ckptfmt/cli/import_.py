"""Bring a checkpoint of another tool into a repository, as a committed and verified generation.

SOURCE: a .safetensors file, a folder of them (with its index, if it has one), a file of torch.save (as weights_only
reads it), a folder with pytorch_model.bin or its numbered files and their index, a torch.distributed.checkpoint
directory, or a Zarr v3 group. It is only read.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from ckptfmt.cli import options

if TYPE_CHECKING:
    from ckptfmt.cli.output import Page
    from ckptfmt.exchange.importing import ImportReport


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="what to import: a path on this machine")
    parser.add_argument(
        "url", metavar="URL[#RUN]", help="the repository, which is made if it is not there, and the run"
    )
    parser.add_argument("--step", type=int, default=0, help="the step that the generation is of (default 0)")
    parser.add_argument("--tag", action="append", default=[], metavar="TAG", help="a tag for it; may be repeated")
    options.add_storage(parser)
    options.add_output(parser)


def run(arguments: Namespace) -> int:
    from ckptfmt.cli.output import emit
    from ckptfmt.cli.progress import progress_bars
    from ckptfmt.errors import InvalidInput, NotFound
    from ckptfmt.exchange.foreign import local_path
    from ckptfmt.exchange.importing import import_checkpoint
    from ckptfmt.reference import parse_reference

    reference = parse_reference(arguments.url)
    if reference.at is not None:
        raise InvalidInput(f"{arguments.url}: an import makes a new generation; leave out @{reference.at}")
    source = local_path(arguments.source)
    if source is None or not source.exists():
        raise NotFound(f"{arguments.source} is not there; give the path of a file or folder of this machine")
    report = import_checkpoint(
        source,
        reference.url,
        run=reference.run or "default",
        step=arguments.step,
        tags=arguments.tag,
        catalog=arguments.catalog,
        storage_options=options.storage_options(arguments.storage_option),
        phases=progress_bars(arguments),
    )
    emit(report, lambda page: show(page, report), as_json=arguments.as_json)
    return 0


def show(page: Page, report: ImportReport) -> None:
    from ckptfmt.cli import quantities as q

    page.heading(
        f"generation #{report.generation_id} of run {report.run!r}, step {report.step:,}: committed and verified"
    )
    values = f" and {q.count(report.values, 'value')}" if report.values else ""
    page.facts(
        [
            (
                "from",
                f"{report.name} ({report.kind}), {q.count(report.files, 'file')} of {q.size(report.source_nbytes)}",
            ),
            ("holds", f"{q.count(report.tensors, 'tensor')}{values}, {q.size(report.nbytes)}"),
            ("took", q.duration(report.seconds)),
            ("to load", f'ckptfmt.load("{report.url}#{report.run}")'),
        ]
    )
