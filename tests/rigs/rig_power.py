"""Cuts the power of one kind of disk at the changes that a job makes to it, and says what was wrong afterwards.

    python rig_power.py '{"work": "/new/folder", "kind": "xfs", "job": "save", "cuts": ["all"], "every": 9, "first": 0}'

Prints one JSON object a line: a summary at the end, and before it the cases that went wrong. The case itself runs in a
forked child: the machine is this process.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from rig_disks import Cut, Disk, Switch, hide_mounts
from rig_jobs import JOBS, Facts, Job, Place, examine, faults_of_job
from rig_meter import Change, Meter
from rig_processes import die_with_parent

REPOSITORY: Final = "a/repository"
_LIMIT_SECONDS: Final = 60


class Enumerator:
    """All cuts of one job on one kind of disk."""

    def __init__(self, work: Path, kind: Any, job: Job, mutant: str | None = None) -> None:
        self.job = job
        self.mutant = mutant
        self.disk = Disk(work, kind, mebibytes=96 if job.name == "large" else 32)
        self.place = Place(self.disk.place / REPOSITORY, work / "catalog.sqlite" if job.apart else None)
        self.disk.mount()
        self.facts = self._prepare()
        self.disk.unmount()
        self.kept = self.disk.keep("prepared")
        self.kept_catalog = self.place.catalog.read_bytes() if self.place.catalog is not None else b""

    def _prepare(self) -> dict[str, Any]:
        def work(say: Callable[..., None]) -> None:
            facts = self.job.prepare(self.place, lambda body: _in_child(lambda _: body()))
            say(facts=facts.as_json())

        said, problem = _in_child(work)
        if problem:
            raise RuntimeError(f"preparing {self.job.name}: {problem}")
        return dict(said[-1]["facts"])

    def _begin(self) -> None:
        self.disk.put_back(self.kept)
        if self.place.catalog is not None:
            for left in self.place.catalog.parent.glob(f"{self.place.catalog.name}*"):
                left.unlink()
            self.place.catalog.write_bytes(self.kept_catalog)
        self.disk.mount()

    def count(self) -> list[str]:
        """The names of the changes that the job makes when nobody cuts it off."""
        self._begin()
        try:
            said, problem = _in_child(lambda say: self._work(say, lambda meter: say(names=meter.names)))
        finally:
            self.disk.unmount()
        if problem:
            raise RuntimeError(f"{self.job.name} without a cut: {problem}")
        return list(said[-1]["names"])

    def _work(self, say: Callable[..., None], done: Callable[[Meter], None], stop: Any = None) -> None:
        def stop_or_fault(change: Change) -> None:
            if stop is not None:
                stop(change)
            faults_of_job(change)

        meter = Meter(stop_or_fault, mutant=self.mutant)
        kept = meter.install()
        self.job.work(self.place, say)
        done(meter)
        del kept

    def case(self, number: int, cut: Cut) -> list[str]:
        """Cut the power before change ``number``, bring the machine up again, and look."""

        def work(say: Callable[..., None]) -> None:
            switch = Switch(self.disk.place)

            def stop(change: Change) -> None:
                if change.number == number:
                    if cut == "torn":
                        change.do_half()
                    switch.cut(cut)
                    os._exit(0)

            self._work(say, lambda meter: switch.cut(cut), stop)  # not reached: the cut comes right after the end

        return self._run(lambda: _in_child(work))

    def case_at(self, seconds: float) -> list[str]:
        """Cut the power after some time, wherever the process is then."""

        def strike() -> None:
            time.sleep(seconds)
            with Switch(self.disk.place) as switch:
                switch.cut("nothing")

        return self._run(lambda: _in_child(lambda say: self.job.work(self.place, say), killed_after=strike))

    def _run(self, work: Callable[[], tuple[list[dict[str, Any]], str]]) -> list[str]:
        facts = Facts.of(self.facts)
        self._begin()
        try:
            said, problem = work()
            for fact in said:
                facts.hear(fact)
            if problem:
                return [f"before the cut: {problem}"]
            self.disk.unmount()
            self.disk.mount()
            found, problem = _in_child(lambda say: say(problems=examine(self.place, facts)))
            return [problem] if problem else list(found[-1]["problems"])
        finally:
            self.disk.unmount()


def _in_child(
    body: Callable[[Callable[..., None]], None], *, killed_after: Callable[[], None] | None = None
) -> tuple[list[dict[str, Any]], str]:
    """Run ``body(say)`` in a forked child; what it said, and the traceback it ended with."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _be_child(body, reading, writing)
    os.close(writing)
    if killed_after is not None:
        killed_after()
        os.kill(child, signal.SIGKILL)
    with os.fdopen(reading, encoding="utf-8") as lines:
        said = [json.loads(line) for line in lines if line.endswith("\n")]
    _, status = os.waitpid(child, 0)
    problem = next((one["problem"] for one in said if "problem" in one), "")
    if not problem and status != 0:
        problem = f"the child ended with status {status}"
    if killed_after is not None:  # between the cut and the kill it may well have seen its disk gone
        problem = ""
    return [one for one in said if "problem" not in one], problem


def _be_child(body: Callable[[Callable[..., None]], None], reading: int, writing: int) -> None:
    os.close(reading)
    signal.alarm(_LIMIT_SECONDS)

    def say(**said: Any) -> None:
        os.write(writing, json.dumps(said).encode() + b"\n")

    status = 0
    try:
        body(say)
    except BaseException:
        text = traceback.format_exc()[-3000:]
        say(problem=text)
        status = 1
    os._exit(status)


def _cases(order: dict[str, Any], total: int) -> Iterator[tuple[int, Cut]]:
    every = [(number, cut) for number in range(1, total + 2) for cut in order["cuts"]]
    yield from every[order["first"] :: order["every"]]


def main(order: dict[str, Any]) -> None:
    logging.disable(logging.CRITICAL)
    die_with_parent()
    hide_mounts()
    began = time.monotonic()
    work = Path(order["work"])
    work.mkdir()
    _warm_up(work / "warm")
    job = JOBS[order["job"]]
    enumerator = Enumerator(work, order["kind"], job, order.get("mutant"))
    count = wrong = 0
    try:
        names = enumerator.count()
        if "seconds" in order:
            dice = random.Random(order["seed"])
            for _ in range(order["times"]):
                after = dice.uniform(0, order["seconds"])
                count += 1
                wrong += _tell(enumerator.case_at(after), kind=order["kind"], job=job.name, after=after)
        else:
            for number, cut in _cases(order, len(names)):
                count += 1
                before = names[number - 1] if number <= len(names) else "the end"
                told = {"kind": order["kind"], "job": job.name, "cut": cut, "number": number, "before": before}
                wrong += _tell(enumerator.case(number, cut), **told)
    finally:
        enumerator.disk.release()
    seconds = time.monotonic() - began
    print(
        json.dumps(
            {"cases": count, "wrong": wrong, "calls": len(names), "names": sorted(set(names)), "seconds": seconds}
        )
    )


def _warm_up(folder: Path) -> None:
    """Load here, once, all code that the children use."""
    place = Place(folder)
    for job in (JOBS["create"], JOBS["save"]):
        job.work(place, lambda **_: None)
    problems = examine(place, Facts(must={"run": {1, 2, 3}}))
    assert problems == [], problems


def _tell(problems: list[str], **case: Any) -> int:
    if problems:
        print(json.dumps({**case, "problems": problems}), flush=True)
    return bool(problems)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
