"""``ckptfmt demo``."""

from __future__ import annotations

import re
from functools import partial
from typing import Annotated, Any

import typer

from ckptfmt.cli import options
from ckptfmt.errors import InvalidInput


def demo(
    directory: Annotated[
        str | None, typer.Argument(metavar="DIR", help="A new or empty folder that stays; else a temporary one.")
    ] = None,
    chaos: Annotated[str | None, typer.Option(metavar="TIME", help="Kill at random for so long: 60s, 2m.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the temporary folder.")] = False,
    as_json: options.Json = False,
) -> None:
    """Train, kill, resume, compare bit by bit, inspect. Needs torch; takes about two minutes."""
    from ckptfmt.cli.output import write_json

    _require_torch()
    from ckptfmt.demo.main import run_chaos, run_demo

    common: dict[str, Any] = {"keep": keep, "echo": _to_stderr if as_json else print}
    run = run_demo if chaos is None else partial(run_chaos, seconds(chaos))
    report = run(directory, **common)
    if as_json:
        write_json({"report": "demo", **report.as_json()})


def seconds(text: str) -> float:
    """``60``, ``60s``, ``2m`` or ``1h`` in seconds."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(s|m|h)?", text)
    if found is None:
        raise InvalidInput(f"--chaos {text!r}: write a time such as 60s or 2m")
    return float(found[1]) * {None: 1, "s": 1, "m": 60, "h": 3600}[found[2]]


def _require_torch() -> None:
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise InvalidInput("the demo trains with torch, which is not installed: pip install 'ckptfmt[torch]'")


def _to_stderr(text: str) -> None:
    typer.echo(text, err=True)
