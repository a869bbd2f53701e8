"""Measure your own stall, commit and restore times in a place, beside torch.save and what disk and memory allow.

Needs torch. What is written goes into a folder of its own and is removed at the end; neither a repository that is there
nor its catalog is touched. Host memory must hold the state three times.
"""

from __future__ import annotations

import re
import signal
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from ckptfmt.cli import options

if TYPE_CHECKING:
    from ckptfmt.cli.output import Page
    from ckptfmt.measure.report import BenchReport, BenchTimings

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30}


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="a folder for a repository (path or file://...), there or not")
    parser.add_argument(
        "--bytes", dest="nbytes", type=size, default=10**9, metavar="SIZE", help="of the state: 8G, 500M (default: 1G)"
    )
    parser.add_argument("--saves", type=_saves, default=3, metavar="N", help="by each, at least 2 (default: 3)")
    options.add_output(parser)


def run(arguments: Namespace) -> int:
    from ckptfmt.cli.local_folder import local_folder, nearest_folder
    from ckptfmt.cli.output import emit

    wanted = local_folder(arguments.url, "bench")
    _require_torch()
    from ckptfmt.measure.bench import Order, run_bench

    order = Order(wanted.as_uri(), nearest_folder(wanted), arguments.nbytes, arguments.saves)
    with _cleaned_up_when_terminated():
        report = run_bench(order, echo=_to_terminal)
    emit(report, lambda page: show(page, report), as_json=arguments.as_json)
    return 0


def size(text: str) -> int:
    """``8G``, ``500M``, ``1.5GiB`` or a number of bytes."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kmgt]?i?)b?", text, re.IGNORECASE)
    unit = None if found is None else _UNITS.get(found[2].upper())
    if found is None or unit is None:
        raise ArgumentTypeError(f"{text!r}: write a size such as 8G or 500M")
    return round(float(found[1]) * unit)


def show(page: Page, report: BenchReport) -> None:
    from ckptfmt.cli import quantities as q
    from ckptfmt.cli.output import style

    direct = "direct I/O" if report.direct else "no direct I/O"
    page.heading(
        f"{q.size(report.nbytes)} in {q.count(report.tensors, 'tensor')} on {report.folder} ({report.file_system}, "
        f"{direct}), {q.count(report.cpus, 'CPU')}"
    )
    rows = [(one.name, *_cells(one)) for one in (report.limits, *report.contenders)]
    columns = (">STALL", ">COMMIT", ">FIRST STALL", ">FIRST COMMIT", ">RESTORE COLD", ">RESTORE WARM")
    page.table(("", *columns), rows, indent=2)
    page.blank()
    page.line("medians; stall: training is blocked; commit: from the call until a restart finds a complete copy;")
    page.line("raw limits: a copy within memory, a write into a fresh file with fsync, reads without any check")
    ours, theirs = report.contenders
    for text, field in (("stall", "stalls"), ("commit", "commits")):
        ratio = _typical(getattr(theirs, field)) / _typical(getattr(ours, field))
        page.line(f"  {theirs.name} takes {style(f'{ratio:.1f}', 'bold')} times our {text}")
    page.line("every restore was compared with what was saved; everything written was removed")
    for path in report.left_over:
        page.line(style(f"an earlier bench was killed and left {path}: remove it", "yellow"))


def _cells(one: BenchTimings) -> tuple[str, ...]:
    from statistics import median

    from ckptfmt.cli import quantities as q

    saves = (one.stalls, one.commits)
    later, first = (_typical(values) for values in saves), (values[0] for values in saves)
    restores = (median(values) for values in (one.restores_cold, one.restores_warm))
    return tuple(q.duration(seconds) for seconds in (*later, *first, *restores))


def _typical(seconds: tuple[float, ...]) -> float:
    """Median without the first one, whose buffers are cold."""
    from statistics import median

    return median(seconds[1:])


def _saves(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 2:
        raise ArgumentTypeError(f"{text!r}: give a number of at least 2, the first save is told apart")
    return int(text)


def _require_torch() -> None:
    from importlib.util import find_spec

    from ckptfmt.errors import InvalidInput

    if find_spec("torch") is None:
        raise InvalidInput("bench compares with torch.save, and torch is not installed: pip install 'ckptfmt[torch]'")


@contextmanager
def _cleaned_up_when_terminated() -> Iterator[None]:
    """A SIGTERM ends this like an interrupt: what was written is removed."""

    def stop(number: int, frame: Any) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _to_terminal(text: str) -> None:
    """Say what goes on, in a line that the next one replaces."""
    if sys.stderr.isatty():
        print(f"\r\x1b[2K{text}", end="", file=sys.stderr, flush=True)
