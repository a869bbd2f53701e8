"""Lets the command line speak about what a demo left."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from ckptfmt.errors import DrillFailed

_PROGRAM = "import sys; from ckptfmt.cli.main import main; sys.argv[0] = 'ckptfmt'; sys.exit(main())"


def show_commands(
    commands: Sequence[Sequence[str]],
    echo: Callable[[str], None],
    *,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Run each as ``ckptfmt ...`` and show its words. ``DrillFailed`` if one fails."""
    for words in commands:
        line = " ".join(("ckptfmt", *words))
        echo(f"\n$ {line}")
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=os.environ | dict(environment),
        )
        echo((done.stdout + done.stderr).rstrip())
        if done.returncode:
            raise DrillFailed(f"`{line}` ended with code {done.returncode}")
