"""Runs functions in forks of this process, which have all modules loaded, and brings back what they returned."""

from __future__ import annotations

import gc
import json
import os
import stat
import sys
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn

_OTHERS: Final = stat.S_IROTH | stat.S_IXOTH


class Forked:
    """A fork that runs ``body`` and ends with it, whatever happens: it never comes back to the caller's tests.

    ``uid`` is the user that it becomes first. ``pid`` is its process id.
    """

    def __init__(self, body: Callable[[], Any], *, uid: int | None = None) -> None:
        self._reading, writing = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the child does not mind that threads were left
            self.pid = os.fork()
        if self.pid == 0:
            os.close(self._reading)
            _be_child(body, uid, writing)
        os.close(writing)

    def end(self) -> tuple[str, int]:
        """Wait for it: its answer as text, '' if it was killed before, and its exit status."""
        with os.fdopen(self._reading) as pipe:
            answer = pipe.read()
        return answer, os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def result(self) -> Any:
        """What ``body`` returned, as JSON has it; ``AssertionError`` with the child's traceback if it raised."""
        return _result(*self.end())


def _result(answer: str, status: int) -> Any:
    assert answer, f"the child ended with status {status} and without an answer"
    fine, result = json.loads(answer)
    assert fine, result
    return result


def _be_child(body: Callable[[], Any], uid: int | None, writing: int) -> NoReturn:
    status = 1
    gc.freeze()  # what the parent's threads hold must not be collected here, where those threads are not
    try:
        try:
            if torch := sys.modules.get("torch"):
                # The parent's pool of OpenMP threads did not come along, and a parallel loop would wait for it for
                # ever; torch's DataLoader does the same in its workers.
                torch.set_num_threads(1)
            if uid is not None:
                os.setgroups([])
                os.setgid(uid)
                os.setuid(uid)
            answer = json.dumps([True, body()])
            status = 0
        except BaseException:
            answer = json.dumps([False, traceback.format_exc()])
        with os.fdopen(writing, "w") as pipe:
            pipe.write(answer)
    finally:
        sys.stderr.flush()
        os._exit(status)


def in_child(body: Callable[[], Any], *, uid: int | None = None) -> Any:
    """Run ``body`` in a fork and wait for its ``result``."""
    return Forked(body, uid=uid).result()


def at_once(work: Callable[[int], Any], workers: int) -> list[Any]:
    """Run ``work(0)``, ``work(1)``, ... in a fork each, all at the same time; their results."""
    children = [Forked(partial(work, number)) for number in range(workers)]
    return [_result(*end) for end in [child.end() for child in children]]


def open_to_others(folder: Path) -> None:
    """Let other users look into ``folder`` of pytest's, and into those above it that are closed to them as well.

    No further than that: the system's own folder for temporary files is open, and stays as it is.
    """
    for each in (folder, *folder.parents):
        if each.stat().st_mode & _OTHERS == _OTHERS:
            return
        each.chmod(0o755)
