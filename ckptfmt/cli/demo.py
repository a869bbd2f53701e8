"""Train, kill, resume, compare, inspect. Needs torch; takes about two minutes.

With --ranks many processes train one model with FSDP2 and save together, with a PostgreSQL catalog;
one of them is killed while it writes, and half of them go on.

With --s3 saves go through a stage to an S3 server of the demo's own; kills also hit what is staged and not durable."""

from __future__ import annotations

import re
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from functools import partial
from typing import Any

from ckptfmt.cli import options


def configure(parser: ArgumentParser) -> None:
    parser.add_argument(
        "directory", nargs="?", metavar="DIR", help="a new or empty folder that stays (default: a temporary one)"
    )
    parser.add_argument("--chaos", type=seconds, metavar="TIME", help="kill at random for so long: 60s, 2m")
    parser.add_argument("--ranks", type=int, metavar="N", help="train on 2, 4 or 8 ranks under torchrun")
    parser.add_argument(
        "--catalog", metavar="URL", help="with --ranks: catalog database (default: a PostgreSQL server for the demo)"
    )
    parser.add_argument(
        "--s3",
        action="store_true",
        help="save to an S3 server for the demo, through a stage folder; also kill in between",
    )
    parser.add_argument("--keep", action="store_true", help="keep the temporary folder")
    options.add_output(parser)


def run(arguments: Namespace) -> int:
    from ckptfmt.cli.output import write_json

    _check(arguments)
    common: dict[str, Any] = {"keep": arguments.keep, "echo": _to_stderr if arguments.as_json else print}
    if arguments.ranks is not None:
        from ckptfmt.demo.ranks.main import run_ranks_demo

        ranks, catalog = arguments.ranks, arguments.catalog
        found = run_ranks_demo(arguments.directory, ranks=ranks, catalog=catalog, **common).as_json()
    elif arguments.s3:
        from ckptfmt.demo.s3 import run_s3_demo

        found = run_s3_demo(arguments.directory, **common).as_json()
    else:
        from ckptfmt.demo.main import run_chaos, run_demo

        demo = run_demo if arguments.chaos is None else partial(run_chaos, arguments.chaos)
        found = demo(arguments.directory, **common).as_json()
    if arguments.as_json:
        write_json(found)
    return 0


def seconds(text: str) -> float:
    """``60``, ``60s``, ``2m`` or ``1h`` in seconds."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(s|m|h)?", text)
    if found is None:
        raise ArgumentTypeError(f"{text!r}: write a time such as 60s or 2m")
    return float(found[1]) * {None: 1, "s": 1, "m": 60, "h": 3600}[found[2]]


def _check(arguments: Namespace) -> None:
    from importlib.util import find_spec

    from ckptfmt.errors import InvalidInput

    if arguments.ranks is not None and arguments.chaos is not None:
        raise InvalidInput(
            "--chaos kills the only process at random, --ranks one of several in mid-flush: leave one out"
        )
    if arguments.s3 and (arguments.ranks is not None or arguments.chaos is not None):
        raise InvalidInput("--s3 has one process and kills of its own: leave out --ranks and --chaos")
    if arguments.ranks is None and arguments.catalog is not None:
        raise InvalidInput("--catalog goes with --ranks: the demo of one process has its catalog in its folder")
    if find_spec("torch") is None:
        raise InvalidInput("the demo trains with torch, which is not installed: pip install 'ckptfmt[torch]'")


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
