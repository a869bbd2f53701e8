"""Kills one rank in mid-flush: it has begun its pack and not acknowledged it, and its generation is ``writing``."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ckptfmt import GenerationInfo, Repository
from ckptfmt.demo.attempt import RUN
from ckptfmt.demo.journal import losses
from ckptfmt.demo.processes import alive, send, task_state
from ckptfmt.demo.ranks.job import JOB_SECONDS, Job, Setup
from ckptfmt.errors import DrillFailed
from ckptfmt.format import layout

POLL_SECONDS = 0.001
_STOP_SECONDS = 5


@dataclass(frozen=True)
class RankKill:
    """What a SIGKILL to one rank hit. ``left`` are the objects of that rank which lay in the generation's folder."""

    rank: int
    ranks: int
    generation: int
    step: int
    left: tuple[str, ...]
    trained: int
    """The last step that the job had trained."""


class Aim:
    def __init__(self, setup: Setup, repo: Repository) -> None:
        self._repo = repo
        key = layout.run_key(RUN)
        self._runs = Path(setup.url, layout.RUNS, key)
        self._commits = Path(layout.commits_folder(key)).name

    def kill_in_mid_flush(self, job: Job, rank: int, *, spare: int) -> RankKill:
        """Let ``spare`` saves pass, then stop ``rank`` as soon as it writes, make sure that it is not through, and kill
        it. One that is through goes on, and the next save is waited for. ``DrillFailed`` if the job ends before."""
        pid = job.pid(rank)
        passed: set[str] = set()
        until = time.monotonic() + JOB_SECONDS
        while not job.ended() and time.monotonic() < until:
            for key in self._folders() - passed:
                names = self._names(key, rank)
                if len(passed) < spare:
                    passed |= {key} if _acknowledged(names) else set()
                elif names:
                    hit = self._kill_if_writing(key, pid, rank, job)
                    if hit is not None:
                        return hit
                    passed.add(key)
            time.sleep(POLL_SECONDS)
        raise DrillFailed(f"{job.name}: no save of {len(passed)} met rank {rank} in mid-flush; ask for more steps")

    def _kill_if_writing(self, key: str, pid: int, rank: int, job: Job) -> RankKill | None:
        with stopped(pid) as still:
            row, names = self._row(key), self._names(key, rank)
            if not still or row is None or row.state != "writing" or _acknowledged(names):
                return None
            send(pid, signal.SIGKILL)
        return RankKill(rank, job.ranks, row.id, row.step, tuple(names), max(losses(job.events(0))))

    def _row(self, key: str) -> GenerationInfo | None:
        return next((one for one in self._repo.generations(run=RUN, state=None) if one.key == key), None)

    def _folders(self) -> set[str]:
        try:
            return set(os.listdir(self._runs)) - {self._commits}
        except FileNotFoundError:
            return set()

    def _names(self, key: str, rank: int) -> list[str]:
        return sorted(name for name in os.listdir(self._runs / key) if layout.is_of_rank(name, rank))


def _acknowledged(names: list[str]) -> bool:
    return any(name.endswith(".part.json") for name in names)


@contextmanager
def stopped(pid: int) -> Iterator[bool]:
    """Let a process stand still. False if it has ended, or does not within seconds."""
    send(pid, signal.SIGSTOP)
    try:
        until = time.monotonic() + _STOP_SECONDS
        while alive(pid) and not _stands(pid) and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
        yield alive(pid) and _stands(pid)
    finally:
        send(pid, signal.SIGCONT)


def _stands(pid: int) -> bool:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return False
    return all(task_state(f"/proc/{pid}/task/{thread}/stat") in ("T", "t", "Z", "") for thread in threads)
