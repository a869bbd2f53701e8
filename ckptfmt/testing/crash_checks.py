"""What must be true of a place after a process ended in it, whatever that process was doing.

Every door is tried: the catalog, a reference in a URL, the command line, and storage alone by proof. Then a new
process recovers, collects garbage and saves, and every door is tried again.
"""

from __future__ import annotations

import io
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import Final

import ckptfmt
from ckptfmt import reading
from ckptfmt.connect import NO_CATALOG
from ckptfmt.engine.keep import gc
from ckptfmt.engine.verdicts import folder_of
from ckptfmt.errors import CkptError, NotFound
from ckptfmt.format import layout
from ckptfmt.format.states import OPEN_STATES, State
from ckptfmt.ports.records import GenerationRecord
from ckptfmt.repository import Repository
from ckptfmt.testing.crash_life import Life, Place
from ckptfmt.testing.crash_scenarios import NEXT_STEP, Save, Scenario, Told

__all__ = ["Door", "Examination", "command_line"]

_NOT_FOUND: Final = 10
_TOMBSTONES: Final = frozenset({layout.COMMIT, layout.RETIRED})


Door = Callable[[Place, Told], list[str]]
"""Looks at a place in one more way, and returns what is wrong there. It may change the place."""


@dataclass
class Examination:
    """One look at a place. ``problems`` says everything that is wrong; best nothing."""

    place: Place
    scenario: Scenario
    told: Told
    command_line: bool = True
    """Try the door of the command line too, at the beginning and at the end."""
    doors: tuple[Door, ...] = ()
    """More doors to try once all is settled."""
    problems: list[str] = field(default_factory=list)

    def run(self) -> list[str]:
        with self._part("repair"):
            self.scenario.repair(self.place)
        self._look("before recover")
        life = Life(self.place)
        try:
            self._settle(life)
        finally:
            life.end()
        self._look("after recover", settled=True, briefly=True)
        life = Life(self.place)
        try:
            self._collect(life)
            self._save_next(life)
        finally:
            life.end()
        self._look("at the end", settled=True)
        for door in self.doors:
            self.problems += door(self.place, self.told)
        return self.problems

    def _wrong(self, text: str) -> None:
        self.problems.append(text)

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        try:
            yield
        except CkptError as error:
            self._wrong(f"{name}: {type(error).__name__}: {error}")

    # -- what opens -------------------------------------------------------------------------------
    def _look(self, when: str, *, settled: bool = False, briefly: bool = False) -> None:
        """Every door: what was reported as committed opens and is whole, and nothing opens that is not committed.

        ``briefly``: that it opens is enough, for bytes are looked at before and once more in the end.
        """
        committed: set[Save] = set()
        with self._part(f"{when}, by the catalog"), self.place.open("r") as repository:
            rows = repository._connection.site.sql().generations()
            committed = {(row.run, row.step) for row in rows if row.state is State.COMMITTED}
            self._compare(f"{when}, by the catalog", committed, self.told.committed | self.told.by_catalog)
            for row in rows:
                self._by_catalog(f"{when}, by the catalog", repository, row, briefly)
            self._by_reference(when, rows, settled)
            if self.command_line and not briefly:
                self._by_command_line(when, rows)
        with self._part(f"{when}, by proof"), self.place.open("r", proof=True) as repository:
            proven = self._by_proof(f"{when}, by proof", repository, briefly)
            must = self.told.committed | (self.told.by_catalog if settled else set())
            self._compare(f"{when}, by proof", proven, must)
            if settled and proven != committed:
                self._wrong(f"{when}: the catalog has {sorted(committed)}, storage proves {sorted(proven)}")
            if not proven <= committed | self.told.retired:  # a tombstone that is still to be made is made by recover
                self._wrong(f"{when}: proven but not committed: {sorted(proven - committed)}")

    def _compare(self, where: str, seen: set[Save], must: set[Save]) -> None:
        if must - seen:
            self._wrong(f"{where}: {sorted(must - seen)} is lost")
        if seen & self.told.failed:
            self._wrong(f"{where}: {sorted(seen & self.told.failed)} opens but was said to have failed")

    def _by_catalog(self, where: str, repository: Repository, row: GenerationRecord, briefly: bool) -> None:
        try:
            generation = repository.generation(row.id)
        except NotFound as error:
            if row.state is State.COMMITTED:
                self._wrong(f"{where}: generation {row.id} does not open: {error}")
            return
        if row.state is not State.COMMITTED:
            self._wrong(f"{where}: generation {row.id} is {row.state} and opens")
        if not briefly:
            self._check(where, generation, row.step)

    def _check(self, where: str, generation: ckptfmt.Generation, step: int) -> None:
        different = self.scenario.differences(generation.load(framework="numpy"), step)
        if different is not None or generation.step != step:
            self._wrong(f"{where}: generation {generation.id} (step {step}): {different}")

    def _by_proof(self, where: str, repository: Repository, briefly: bool) -> set[Save]:
        seen = set()
        for info in repository.generations():
            with self._part(f"{where}: generation {info.id}"):
                generation = reading.find(repository._connection, info.run, info.id)
                if not briefly:
                    self._check(where, generation, info.step)
                seen.add((info.run, info.step))
        return seen

    def _by_reference(self, when: str, rows: list[GenerationRecord], settled: bool) -> None:
        """What is not committed has no name that leads to it."""
        for row in _hidden(rows):
            stone_pending = row.state is State.RETIRED and not settled
            for catalog in (self.place.catalog, *(() if stone_pending else (NO_CATALOG,))):
                reference = f"{self.place.url}#{row.run}@{row.id}"
                try:
                    ckptfmt.load(reference, catalog=catalog)
                except NotFound:
                    continue
                self._wrong(f"{when}: {reference} loads with catalog={catalog}, but is {row.state}")

    def _by_command_line(self, when: str, rows: list[GenerationRecord]) -> None:
        options = [] if self.place.catalog is None else ["--catalog", self.place.catalog]
        for row in _hidden(rows):
            code, out = command_line("inspect", f"{self.place.url}#{row.run}@{row.id}", *options)
            if code not in (0, _NOT_FOUND) or (code == 0 and row.state not in out):
                self._wrong(f"{when}: `ckptfmt inspect` of generation {row.id} ({row.state}) ends with {code}: {out}")
            code, out = command_line("verify", f"{self.place.url}#{row.run}@{row.id}", *options)
            if code != _NOT_FOUND:
                self._wrong(f"{when}: `ckptfmt verify` of generation {row.id} ({row.state}) ends with {code}: {out}")
        for run in {row.run for row in rows if row.state is State.COMMITTED}:
            code, out = command_line("verify", f"{self.place.url}#{run}", *options)
            if code != 0:
                self._wrong(f"{when}: `ckptfmt verify` of run {run!r} ends with {code}: {out}")

    # -- what comes next --------------------------------------------------------------------------
    def _settle(self, life: Life) -> None:
        """recover leaves nothing open and nothing unproven, and finds nothing to do the second time."""
        with self._part("recover"):
            life.repository.recover()
            again = life.repository.recover().actions
            if again:
                self._wrong(f"recover did something the second time: {again}")
            rows = life.site.sql().generations()
            left = [(row.id, row.state) for row in rows if row.state in OPEN_STATES]
            unproven = [row.id for row in rows if row.state is State.COMMITTED and row.proven_at is None]
            if left or unproven:
                self._wrong(f"recover left {left} open and {unproven} without a proof")

    def _collect(self, life: Life) -> None:
        """gc takes nothing that is committed, and leaves tombstones of the rest."""
        with self._part("gc"):
            site = life.site
            live = {row.id for row in site.sql().generations(states=[State.COMMITTED])}
            done = gc.collect(site, dry_run=False, grace=timedelta(0))
            taken = {item.generation_id for item in done.items} & live
            if taken or done.unknown or done.damaged or done.adopted:
                self._wrong(f"gc took objects of committed generations {taken}, or found what it should not: {done}")
            again = gc.collect(site, dry_run=True, grace=timedelta(0))
            if again.items or site.backend.sweep_debris(layout.RUNS, dry_run=True):
                self._wrong(f"gc left {again.items}")
            for row in site.sql().generations():
                names = {info.key.rpartition("/")[2] for info in site.backend.list(folder_of(row))}
                if row.state is not State.COMMITTED and names - _TOMBSTONES:
                    self._wrong(f"gc left {names} of generation {row.id} ({row.state})")

    def _save_next(self, life: Life) -> None:
        """Every run can be resumed at its latest generation, and saved to."""
        for run in sorted(self.told.runs()):
            with self._part(f"the next save of run {run!r}"), life.checkpointer(run) as checkpointer:
                latest = life.site.sql().latest(run)
                into = dict.fromkeys(self.scenario.state(0))
                report = checkpointer.restore(into, strict=False)
                resumed = None if report is None else report.generation_id
                if resumed != (None if latest is None else latest.id):
                    self._wrong(f"run {run!r} was resumed at generation {resumed}, the latest is {latest}")
                pending = checkpointer.save(self.scenario.state(NEXT_STEP), step=NEXT_STEP)
                assert pending is not None
                self.told.hear(pending)
                if (run, NEXT_STEP) not in self.told.committed:
                    self._wrong(f"the next save of run {run!r} was not committed: {pending.error}")


def _hidden(rows: list[GenerationRecord]) -> list[GenerationRecord]:
    return [row for row in rows if row.state is not State.COMMITTED]


@cache
def _parser() -> ArgumentParser:
    from ckptfmt.cli.main import parser

    return parser()


def command_line(*arguments: str) -> tuple[int, str]:
    """Run ``ckptfmt`` in this process: its exit code and what it printed, or the error."""
    from ckptfmt.cli.exit_codes import exit_code
    from ckptfmt.cli.main import VERBS

    text = io.StringIO()
    with redirect_stdout(text), redirect_stderr(text):
        try:
            given = _parser().parse_args(arguments)
            code = int(VERBS[given.verb].run(given))
        except Exception as error:
            return exit_code(error), f"{text.getvalue()}{error}"
    return code, text.getvalue()
