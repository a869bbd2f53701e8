"""A run that a framework saves to: opened when it is first used, since frameworks make their parts long before."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import ckptfmt
from ckptfmt import exits
from ckptfmt.checkpointer import Checkpointer
from ckptfmt.errors import NotFound
from ckptfmt.generation import Generation
from ckptfmt.reference import At, parse_reference
from ckptfmt.repository import Repository


class OpenRun:
    """The run that a reference names (default "default"), with its launch once that has begun.

    ``open_with`` are arguments of ``ckptfmt.open``, ``options`` those of ``Repository.checkpointer``.
    """

    def __init__(
        self, place: str | os.PathLike[str], open_with: Mapping[str, Any] | None, options: Mapping[str, Any]
    ) -> None:
        reference = parse_reference(place)
        self.url = reference.url
        self.name = reference.run or "default"
        self.at: At = reference.at
        self.open_with = dict(open_with or {})
        self._options = dict(options)
        self._repository: Repository | None = None
        self._checkpointer: Checkpointer | None = None

    @property
    def reference(self) -> str:
        """``<repository>#<run>``"""
        return f"{self.url}#{self.name}"

    @property
    def repository(self) -> Repository:
        """The repository, open for saving."""
        if self._repository is None:
            self._repository = ckptfmt.open(self.url, **self.open_with)
        return self._repository

    @property
    def checkpointer(self) -> Checkpointer:
        """The checkpointer of this process. The first call begins the launch: what an older one left is settled."""
        if self._checkpointer is None:
            self._checkpointer = self.repository.checkpointer(self.name, **self._options)
        return self._checkpointer

    def find(self, at: At) -> Generation:
        """A committed generation of the run, for reading; nothing is created. ``NotFound``, ``NotCommitted``."""
        with ckptfmt.open(self.url, mode="r", **self.open_with) as repository:
            if at is None:
                return repository.latest(self.name)
        name = f"{self.reference}@{at}"
        with ckptfmt.open(name, mode="r", **self.open_with) as repository:
            return repository.latest()

    def exists(self) -> bool:
        """Whether the run has been saved to, committed or not. What cannot be read or told is an error, not a no."""
        return self._any(None)

    def has_committed(self) -> bool:
        """Whether there is anything to resume from."""
        return self._any("committed")

    def _any(self, state: str | None) -> bool:
        try:
            repository = ckptfmt.open(self.url, mode="r", **self.open_with)
        except NotFound:
            return False
        with repository:
            return bool(repository.generations(run=self.name, state=state, limit=1))

    def settle(self) -> None:
        """Wait for the saves in flight. Raises what failed."""
        if self._checkpointer is not None:
            self._checkpointer.wait()

    def close(self, error: BaseException | None = None) -> None:
        """Drain and end the launch; the next use opens the run again. A failed save never masks ``error``."""
        checkpointer, self._checkpointer = self._checkpointer, None
        repository, self._repository = self._repository, None
        with exits.body_first(error):
            try:
                if checkpointer is not None:
                    checkpointer.close()
            finally:
                if repository is not None:
                    repository.close()
