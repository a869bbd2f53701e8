"""One life of the training process, from its start to its end or its SIGKILL."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptfmt.demo.journal import read_journal
from ckptfmt.errors import DrillFailed

RUN = "demo"


@dataclass(frozen=True)
class Setup:
    """What every process of one comparison has in common."""

    folder: Path
    size: str
    seed: int
    every: int
    """Steps from one save to the next."""
    threads: int = 1
    """One: on two cores the other is the saver's, and sums keep their order."""

    @property
    def corpus(self) -> Path:
        return self.folder / "corpus.txt"

    @property
    def url(self) -> str:
        return str(self.folder / "repository")


class Attempt:
    """A training process that runs until step ``steps``, saving unless ``saving`` is False."""

    def __init__(self, setup: Setup, name: str, *, steps: int, saving: bool = True) -> None:
        self.name = name
        self.journal = setup.folder / f"{name}.jsonl"
        self._errors = setup.folder / f"{name}.stderr"
        command = [sys.executable, "-m", "ckptfmt.demo.train", "--steps", str(steps), "--every", str(setup.every)]
        command += ["--corpus", str(setup.corpus), "--journal", str(self.journal), "--run", RUN]
        command += ["--size", setup.size, "--seed", str(setup.seed), "--threads", str(setup.threads)]
        if saving:
            command += ["--url", setup.url]
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors)

    def events(self) -> list[dict[str, Any]]:
        return read_journal(self.journal)

    def ended(self) -> bool:
        """Whether it has reached its last step. Raises ``DrillFailed`` if it died of something else."""
        code = self._process.poll()
        if code:
            words = self._errors.read_text(errors="replace")[-4000:]
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
