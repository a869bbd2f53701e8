"""Every way in which a generation is read, and what came of it."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from damage_bench import CHUNK_BYTES, NAMES, Bench, blank, state

import ckptfmt
from ckptfmt.cli.main import main


@dataclass
class Target:
    """What is to be read: the latest generation of run ``main``, or, if it is retired, generation 1 of ``old``."""

    bench: Bench
    number: int

    @property
    def root(self) -> Path:
        return self.bench.root

    @property
    def run(self) -> str:
        return "old" if self.number == 1 else "main"

    @property
    def at(self) -> int | None:
        return 1 if self.number == 1 else None


@dataclass
class Told:
    """Something wrong, as a report or an error tells it."""

    text: str
    offset: int | None = None


@dataclass
class Answer:
    """What a path gave: whole tensors by name, slices by (name, start, stop), or a report without the clock's share."""

    step: int | None = None
    values: dict[Any, Any] = field(default_factory=dict)
    report: Any = None
    problems: list[Told] = field(default_factory=list)
    fell_back_from: tuple[int, ...] = ()

    def is_true(self) -> bool:
        """Whether every byte is that of the step it claims to be."""
        if self.step is None:
            return True
        saved = state(self.step)
        for name, value in self.values.items():
            expected = saved[name[0]][name[1] : name[2]] if isinstance(name, tuple) else saved[name]
            if not (
                np.array_equal(value, expected) and getattr(value, "dtype", None) == getattr(expected, "dtype", None)
            ):
                return False
        return True


Path_ = Callable[[Target], Answer]


def _found(value: dict[str, Any]) -> Answer:
    return Answer(value.get("epoch"), value)


def load(target: Target) -> Answer:
    return _found(ckptfmt.load(target.root, run=target.run, at=target.at))


def load_keys(target: Target) -> Answer:
    return _found(ckptfmt.load(target.root, run=target.run, at=target.at, keys="small"))


def by_proof(target: Target) -> Answer:
    return _found(ckptfmt.load(target.root, run=target.run, at=target.at, catalog="none"))


def folder(target: Target) -> Answer:
    return _found(ckptfmt.load(target.bench.folder(target.number)))


def slices(name: str, start: int, stop: int) -> Path_:
    def read(target: Target) -> Answer:
        with ckptfmt.open(target.root, mode="r") as repository:
            at = target.at
            generation = repository.latest(target.run) if at is None else repository.generation(at)
            return Answer(generation.step, {(name, start, stop): generation[name][start:stop]})

    return read


def restore(*, atomic: bool) -> Path_:
    def fill(target: Target) -> Answer:
        live = blank()
        tensors = [live[name] for name in NAMES]
        try:
            report = ckptfmt.restore(live, target.root, run=target.run, at=target.at, atomic=atomic)
        except BaseException:
            _check_untouched(tensors, atomic, target.number)
            raise
        assert all(live[name] is tensor for name, tensor in zip(NAMES, tensors, strict=True))
        assert report.step == live["epoch"]
        return _found(live)

    return fill


def _check_untouched(tensors: list[Any], atomic: bool, step: int) -> None:
    """An atomic restore that fails leaves zeros; another one zeros or verified bytes, chunk by chunk."""
    for name, tensor in zip(NAMES, tensors, strict=True):
        raw, saved = tensor.tobytes(), state(step)[name].tobytes()
        for at in range(0, len(raw), CHUNK_BYTES):
            piece = raw[at : at + CHUNK_BYTES]
            assert not any(piece) or (not atomic and piece == saved[at : at + CHUNK_BYTES]), (name, at)


def arena(*, fallback: bool) -> Path_:
    def fill(target: Target) -> Answer:
        live = blank()
        with ckptfmt.open(target.root) as repository, repository.checkpointer(target.run) as checkpointer:
            try:
                report = checkpointer.restore(live, at=None if fallback else target.at, fallback=fallback)
            except BaseException:
                _check_untouched([live[name] for name in NAMES], True, target.number)
                raise
        assert report is not None
        return Answer(report.step, live, fell_back_from=report.fell_back_from)

    return fill


# -- the command line -------------------------------------------------------------------------------
_CLOCK = {"seconds", "at", "age", "now", "lag_seconds", "age_seconds", "since"}


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _timeless(item) for name, item in value.items() if name not in _CLOCK}
    return [_timeless(item) for item in value] if isinstance(value, list) else value


def tool(*words: str) -> Path_:
    def call(target: Target) -> Answer:
        at = 1 if target.number == 1 else target.number
        where = [word.format(root=target.root, run=target.run, at=at, before=4 if at > 3 else 3) for word in words]
        out, err = io.StringIO(), io.StringIO()
        code: Any = None
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main([*where, "--json"])
            except SystemExit as stop:
                code = stop.code
        report = json.loads(out.getvalue()) if out.getvalue().startswith("{") else None
        if code == 0:
            return Answer(report=_timeless(report))
        assert code in (10, 11, 12, 13, 14, 15), (code, err.getvalue())
        problems = [Told(f"{row['object']} {row['message']}", row["offset"]) for row in _problems(report)]
        return Answer(report=code, problems=problems or [Told(err.getvalue() or out.getvalue())])

    return call


def _problems(report: Any) -> list[Any]:
    if isinstance(report, dict):
        if {"object", "message", "offset"} <= report.keys():
            return [report]
        return [row for item in report.values() for row in _problems(item)]
    return [row for item in report for row in _problems(item)] if isinstance(report, list) else []


PATHS: dict[str, Path_] = {
    "load": load,
    "load keys=": load_keys,
    "restore": restore(atomic=True),
    "restore, cached pages": restore(atomic=True),
    "restore atomic=False": restore(atomic=False),
    "slice of chunk 1": slices("big", 5, 5000),
    "slice over chunks 2, 3": slices("big", CHUNK_BYTES + 5, 2 * CHUNK_BYTES + 5),
    "slice at the end": slices("last", 10_000, 10_007),
    "load catalog=none": by_proof,
    "folder by itself": folder,
    "verify": tool("verify", "{root}#{run}@{at}"),
    "inspect": tool("inspect", "{root}#{run}@{at}"),
    "diff": tool("diff", "{root}#{run}@{before}", "{root}#{run}@{at}"),
    "Checkpointer.restore": arena(fallback=False),
    "restore fallback=True": arena(fallback=True),
}
"""Those that open for writing come last: after each of them everything is put back."""
