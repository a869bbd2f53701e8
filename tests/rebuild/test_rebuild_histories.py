"""Whatever happened before: without its catalog a root comes back with the same committed generations, and no other."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from rebuild_rig import abort, assert_state, save, site_of, sweep, told

import ckptfmt
from ckptfmt.cli.repair import repair_catalog
from ckptfmt.engine.keep.gc import retire
from ckptfmt.engine.load.resolve import proven_runs
from ckptfmt.errors import Conflict, NotCommitted, NotFound
from ckptfmt.format import layout
from ckptfmt.format.states import State

RUNS = st.sampled_from(["a", "b"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("save"), RUNS, st.integers(1, 3)),
        st.tuples(st.just("abort"), RUNS, st.just(0)),
        st.tuples(st.just("retire"), RUNS, st.integers(0, 3)),
        st.tuples(st.just("sweep"), RUNS, st.just(0)),
        st.tuples(st.just("tag"), RUNS, st.integers(0, 3)),
        st.tuples(st.just("rebuild"), RUNS, st.just(0)),
        st.tuples(st.just("merge"), RUNS, st.just(0)),
    ),
    min_size=1,
    max_size=7,
)


def _take(root: Path, step: tuple[str, str, int], seeds: list[int]) -> None:
    what, run, number = step
    if what == "save":
        saved = [len(seeds) * 10 + n for n in range(number)]
        seeds += saved
        save(root, *saved, run=run)
    elif what in ("rebuild", "merge"):
        if what == "rebuild":
            (root / "catalog.sqlite").unlink()
        repair_catalog(root, how=what)  # type: ignore[arg-type]
        with site_of(root) as site:
            for record in site.sql().runs():
                site.sql().set_retention_hold(record.name, False)
    else:
        with site_of(root) as site:
            site.sql().ensure_run(run, layout.run_key(run))
            rows = site.sql().generations(run=run, states=[State.COMMITTED])
            if what == "abort":
                abort(site, run)
            elif what == "sweep":
                sweep(site)
            elif rows and what == "tag":
                site.sql().tag(rows[number % len(rows)].id, "best")
            elif rows and what == "retire":
                with contextlib.suppress(Conflict):  # the newest and tagged ones stay
                    retire(site, rows[number % len(rows)].id)


def _check(root: Path, steps: Sequence[tuple[str, str, int]]) -> None:
    seeds: list[int] = []
    ckptfmt.open(root).close()
    for step in steps:
        _take(root, step, seeds)
    with site_of(root) as site:
        before: dict[str, Any] = {run: rows for run, rows in told(site).items() if rows}
        every = site.sql().generations()
        used = max((row.id for row in every), default=0)
    (root / "catalog.sqlite").unlink()
    assert repair_catalog(root, how="rebuild").left_out == ()
    with site_of(root) as site:
        assert {run: rows for run, rows in told(site).items() if rows} == before
        assert proven_runs(site) == sorted(before)
        for row in every:
            found = site.sql().generation_by_key(row.key)
            if row.state is State.ABORTED and found is None:
                continue
            if row.state is State.ABORTED or found is None:
                raise AssertionError(f"{row.state} {row.id}: {found}")
            assert (found.id, found.step, found.state, found.commit_seq) == (
                row.id,
                row.step,
                row.state,
                row.commit_seq,
            )
    _nothing_else_opens(root, every)
    for run in before:
        assert_sound_run(root, run, before)
    assert all(new > used for new in save(root, 1000, run="a"))


def assert_sound_run(root: Path, run: str, before: dict[str, Any]) -> None:
    with ckptfmt.open(root, mode="r") as repository:
        assert [info.id for info in repository.generations(run=run)] == [row[0] for row in before[run]]
        assert_state(repository.latest(run).load(), before[run][0][2])
        for row in before[run]:
            assert_state(repository.generation(row[0]).load(), row[2])


def _nothing_else_opens(root: Path, every: Sequence[Any]) -> None:
    for catalog in (None, "none"):
        for row in every:
            if row.state is State.COMMITTED:
                continue
            opened = ckptfmt.open(f"{root}#{row.run}", mode="r", catalog=catalog)
            with opened as repository, pytest.raises((NotCommitted, NotFound)):
                repository.generation(row.id)


def _run(steps: Sequence[tuple[str, str, int]], template: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        _check(Path(shutil.copytree(template, Path(folder) / "ckpts")), steps)


_QUICK = settings(
    max_examples=8,
    deadline=None,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@pytest.mark.slow
@_QUICK
@given(steps=STEPS)
@example(steps=[("rebuild", "a", 0), ("merge", "a", 0), ("abort", "a", 0)])  # the id is nowhere on storage
def test_random_histories(empty_repository: Path, steps: Sequence[tuple[str, str, int]]) -> None:
    _run(steps, empty_repository)


@pytest.mark.long
@settings(_QUICK, max_examples=60)
@given(steps=STEPS)
def test_many_random_histories(empty_repository: Path, steps: Sequence[tuple[str, str, int]]) -> None:
    _run(steps, empty_repository)
