"""``python -m ckptfmt.demo [DIR] [--chaos 60s] [--keep]``: what ``ckptfmt demo`` runs."""

from __future__ import annotations

import argparse
import sys

from ckptfmt.demo.main import run_chaos, run_demo
from ckptfmt.errors import CkptError


def seconds(text: str) -> float:
    """``60``, ``60s`` or ``2m``."""
    factor = {"s": 1.0, "m": 60.0}.get(text[-1:])
    return float(text) if factor is None else float(text[:-1]) * factor


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ckptfmt.demo", description="Train, kill, resume, compare, inspect."
    )
    parser.add_argument(
        "directory", nargs="?", metavar="DIR", help="new or empty folder that stays (default: a temporary one)"
    )
    parser.add_argument("--chaos", type=seconds, metavar="TIME", help="kill at random for so long, e.g. 60s")
    parser.add_argument("--keep", action="store_true", help="keep the temporary folder")
    arguments = parser.parse_args()
    try:
        if arguments.chaos is not None:
            run_chaos(arguments.chaos, arguments.directory, keep=arguments.keep)
        else:
            run_demo(arguments.directory, keep=arguments.keep)
    except CkptError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
