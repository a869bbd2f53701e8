"""A repository on a disk that fails, and what must hold for every failure."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from error_chain import chain_of
from rig_jobs import differences, state_of

import ckptfmt
from ckptfmt.checkpointer import Checkpointer
from ckptfmt.errors import CkptError, OutcomeUnknown, SaveFailed
from ckptfmt.format import layout
from ckptfmt.format.states import State
from ckptfmt.repository import Repository

RUN = "run"


class Saves:
    """A repository whose run has two committed generations (steps 1 and 2) once it has begun, while nothing failed."""

    def __init__(self, root: Path, catalog: Path | None = None, *, numbers: int = 30_000) -> None:
        self.root = root
        self.numbers = numbers
        self.catalog = None if catalog is None else f"sqlite:///{catalog}"
        self.committed: list[int] = []
        self.unknown: set[int] = set()
        """Steps whose outcome could not be told: a later launch may have finished them."""

    def begin(self) -> Saves:
        """Make the repository and its first two generations."""
        with self.open() as repository, repository.checkpointer(RUN) as checkpointer:
            for step in (1, 2):
                self.save(checkpointer, step).result()
                self.committed.append(step)
        return self

    def open(self, **options: Any) -> Repository:
        return ckptfmt.open(self.root, catalog=self.catalog, **options)

    def save(self, checkpointer: Checkpointer, step: int) -> Any:
        return checkpointer.save(state_of(step, self.numbers), step=step)

    @contextlib.contextmanager
    def checkpointer(self, seconds: float = 2.0) -> Iterator[Checkpointer]:
        """A checkpointer whose save fails after ``seconds``; an error that the test has seen does not come again."""
        with self.open() as repository, repository.checkpointer(RUN, commit_timeout=seconds) as checkpointer:
            yield checkpointer

    def fail(self, checkpointer: Checkpointer, step: int) -> SaveFailed:
        """Save, and expect it to fail; its writer has ended, too, and will not profit from what is healed."""
        error = self.save(checkpointer, step).exception(60)
        assert isinstance(error, SaveFailed), error
        until = time.monotonic() + 60
        while [one for one in threading.enumerate() if one.name.startswith("ckptfmt-save-")]:
            assert time.monotonic() < until, "the writer does not come to its end"
            time.sleep(0.01)
        return error

    def note(self, step: int, error: BaseException | None) -> None:
        """Take down what came of a save."""
        if error is None:
            self.committed.append(step)
        elif isinstance(error, OutcomeUnknown):
            self.unknown.add(step)

    # -- what must hold -------------------------------------------------------------------------
    def assert_intact(self) -> None:
        """What was committed loads bit by bit, nothing else opens, by both doors."""
        for catalog in (self.catalog, "none"):
            with ckptfmt.open(self.root, mode="r", catalog=catalog) as repository:
                found = repository.generations(run=RUN)
                steps = [info.step for info in found]
                assert [step for step in steps if step not in self.unknown] == self.committed[::-1], steps
                newest = repository.latest(RUN)
                assert differences(newest.load(), newest.step) is None
                assert newest.verify().ok

    def assert_swept(self) -> None:
        """Nothing but tombstones is left of a generation that was not committed, and no unfinished create."""
        with self.open() as repository:
            site = repository._connection.site
            for row in site.sql().generations(run=RUN):
                if row.state is State.COMMITTED:
                    continue
                names = {info.key.rpartition("/")[2] for info in site.backend.list(f"runs/{row.run_key}/{row.key}")}
                assert names <= {layout.COMMIT, layout.RETIRED}, (row.id, row.state, names)
            assert site.backend.sweep_debris("runs", dry_run=True) == []

    def assert_heals(self, step: int) -> None:
        """The fault is gone: recover and gc find nothing that stops them, the next save commits."""
        with self.open() as repository:
            repository.recover()
            repository.gc(dry_run=False)
            with repository.checkpointer(RUN) as checkpointer:
                self.save(checkpointer, step).result()
                self.committed.append(step)
        self.assert_intact()
        self.assert_swept()


@contextlib.contextmanager
def before(checkpointer: Checkpointer, name: str, act: Callable[[], None], match: str = "") -> Iterator[list[str]]:
    """Do something right before the first system call of this name on such a path; the paths where it was done."""
    calls: Any = checkpointer._context.site.backend._sys  # type: ignore[attr-defined]
    real = getattr(calls, name)
    done: list[str] = []

    def call(subject: Any, *arguments: Any) -> Any:
        path = str(arguments[0] if name == "link" else subject)
        if match in path and not done:
            done.append(path)
            act()
        return real(subject, *arguments)

    setattr(calls, name, call)
    try:
        yield done
    finally:
        delattr(calls, name)


def assert_tells(error: BaseException | None, kind: type[CkptError], *words: str) -> None:
    """The save's failure names run, step and generation; its cause is of ``kind``, says what to do, and the message
    holds ``words``."""
    assert isinstance(error, SaveFailed), error
    text = str(error)
    assert text.startswith(f"run {RUN!r}, step "), text
    assert f"generation {error.generation_id}" in text, text
    assert error.key
    assert error.stage in ("begin", "persist", "merge", "commit"), text
    assert any(isinstance(cause, kind) for cause in chain_of(error)), [type(cause) for cause in chain_of(error)]
    assert ";" in text or ": " in text.rpartition(")")[2], text  # what to do next
    for word in words:
        assert word in text, (word, text)
