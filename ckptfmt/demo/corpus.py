"""Real text to train on: the source and the documents of the installed package."""

from __future__ import annotations

import os
from pathlib import Path

import ckptfmt

SUFFIXES = (".py", ".md")


def write_corpus(path: Path) -> int:
    """Write all text of the installed package, sorted by name, to ``path``; return its bytes.

    Training reads that copy, so that editing the package between a kill and a resume changes nothing.
    """
    (package,) = ckptfmt.__path__
    files = [
        Path(folder, name)
        for folder, _, names in os.walk(package, followlinks=True)
        for name in names
        if name.endswith(SUFFIXES)
    ]
    path.write_bytes(b"\n".join(file.read_bytes() for file in sorted(files)))
    return path.stat().st_size
