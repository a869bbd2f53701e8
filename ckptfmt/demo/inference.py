"""An inference host: ``python -m ckptfmt.demo.inference REFERENCE`` loads the model where no SQL library is."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import ckptfmt
from ckptfmt.demo.digests import digests
from ckptfmt.demo.journal import Journal

SQL = ("sqlalchemy", "alembic", "sqlite3", "psycopg")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("reference")
    parser.add_argument("--journal", type=Path, required=True)
    arguments = parser.parse_args(words)
    for name in SQL:
        sys.modules[name] = None  # type: ignore[assignment]  # as if it were not installed
    began = time.perf_counter()
    model = ckptfmt.load(arguments.reference, subtree="model")
    seconds = time.perf_counter() - began
    nbytes = sum(tensor.nbytes for tensor in model.values())
    Journal(arguments.journal).tell("loaded", seconds=seconds, nbytes=nbytes, digests=digests({"model": model}))


if __name__ == "__main__":
    main()
