"""One life of the training process, from its start to its end or its SIGKILL."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from ckptfmt.demo.journal import read_journal
from ckptfmt.demo.place import Place
from ckptfmt.errors import DrillFailed

RUN = "demo"
"""The run that they all save."""


class Running(Protocol):
    """A started process; ``subprocess.Popen`` is one."""

    def poll(self) -> int | None: ...

    def kill(self) -> None: ...

    def wait(self) -> int: ...


Start = Callable[[Sequence[str], Path], Running]
"""Starts ``ckptfmt.demo.train`` with these arguments; what it prints goes to that file."""


def start_process(
    arguments: Sequence[str], output: Path, *, environment: Mapping[str, str] = MappingProxyType({})
) -> Running:
    """``environment`` adds to this process's own: there go keys, which arguments would show to everybody."""
    with output.open("wb") as file:
        command = [sys.executable, "-m", "ckptfmt.demo.train", *arguments]
        here = os.environ | dict(environment)
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=here)


@dataclass(frozen=True, kw_only=True)
class Setup(Place):
    """What every process of one comparison has in common."""

    size: str
    threads: int = 1
    """One: on two cores the other is the saver's, and sums keep their order."""
    start: Start = start_process
    catalog: str | None = None
    """None: the one in the repository. Processes have to be told by what starts them, and so have the keys."""
    storage_options: Mapping[str, Any] | None = None
    stage: Path | None = None


class Attempt:
    """A training process that runs until step ``steps``, saving unless ``saving`` is False."""

    def __init__(self, setup: Setup, name: str, *, steps: int, saving: bool = True) -> None:
        self.name = name
        self.journal = setup.folder / f"{name}.jsonl"
        self._output = setup.folder / f"{name}.output"
        arguments = setup.arguments(self.journal, steps=steps, saving=saving)
        arguments += ["--size", setup.size, "--threads", str(setup.threads)]
        arguments += ["--stage", str(setup.stage)] if saving and setup.stage is not None else []
        self._process = setup.start(arguments, self._output)

    def events(self) -> list[dict[str, Any]]:
        return read_journal(self.journal)

    def ended(self) -> bool:
        """Whether it has reached its last step. Raises ``DrillFailed`` if it died of something else."""
        code = self._process.poll()
        if code:
            words = self._output.read_text(errors="replace")[-4000:]
            raise DrillFailed(f"the training process {self.name} ended with code {code}; it said:\n{words}")
        return code == 0

    def wait(self) -> list[dict[str, Any]]:
        """Wait for its end and return its events."""
        self._process.wait()
        self.ended()
        return self.events()

    def wait_for_training(self) -> bool:
        """Wait until it trains (a restore lies behind it). False if it came to its end at once."""
        while not self.events():
            if self.ended():
                return False
            time.sleep(0.01)
        return True

    def kill(self) -> bool:
        """SIGKILL, and wait for its death. False if it had ended by itself before."""
        if self.ended():
            return False
        self._process.kill()
        return self._process.wait() != 0

    def discard(self) -> None:
        """End the process in whatever state it is; for the way out of an error."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
