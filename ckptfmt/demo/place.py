"""What all processes of one demo have in common: a folder with the text and the repository, and how they train."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Place:
    folder: Path
    seed: int
    every: int
    """Steps from one save to the next."""
    repository: str | None = None
    """URL of the repository; None: a folder beside the text."""

    @property
    def corpus(self) -> Path:
        return self.folder / "corpus.txt"

    @property
    def url(self) -> str:
        return str(self.folder / "repository") if self.repository is None else self.repository

    def arguments(self, journal: Path, *, steps: int, saving: bool) -> list[str]:
        """What every training process is told, whichever it is (``ckptfmt.demo.train.parser``)."""
        told = ["--corpus", str(self.corpus), "--journal", str(journal), "--seed", str(self.seed)]
        told += ["--steps", str(steps), "--every", str(self.every)]
        return [*told, "--url", self.url] if saving else told
