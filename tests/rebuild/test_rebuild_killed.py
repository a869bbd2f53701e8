"""A rebuild that dies anywhere is run again, and nothing half-made is taken for a catalog meanwhile."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rebuild_rig import Told, assert_sound, goes_on, save, site_of, told

import ckptfmt
from ckptfmt import connect
from ckptfmt.catalog.snapshot import SqliteSession
from ckptfmt.cli.repair import repair_catalog
from ckptfmt.errors import CkptError
from ckptfmt.testing.faults import Fault, FaultyBackend

History = dict[str, list[Told]]
SLOW = pytest.mark.slow
CASES = [
    ("rebuild", "before"),
    pytest.param("rebuild", "after", marks=SLOW),
    pytest.param("merge", "before", marks=SLOW),
    ("merge", "after"),
    pytest.param("adopt", "before", marks=SLOW),
    pytest.param("adopt", "after", marks=SLOW),
]


class Killed(BaseException):
    """The process ends here."""


@contextmanager
def _patched(target: Any, name: str, value: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, name, value)
        yield


def _prepare(root: Path, how: str) -> History:
    """Lose, put back or copy the catalog; hints are missing, too. Return what storage proves."""
    if how == "merge":
        shutil.copy(root / "catalog.sqlite", root.with_name("old.sqlite"))
    save(root, 61)
    with site_of(root) as site:
        after = told(site)
    for hint in sorted(root.glob("runs/*/commits/*"))[:2]:
        hint.unlink()
    if how == "merge":
        shutil.copy(root.with_name("old.sqlite"), root / "catalog.sqlite")
    elif how == "rebuild":
        (root / "catalog.sqlite").write_bytes(b"garbage" * 5000)
    return after


def _finish(root: Path, how: str) -> None:
    """What an operator does next: the same again, unless it was done."""
    if how == "adopt":  # the copy works before and after
        repair_catalog(root, how="adopt")
    try:
        ckptfmt.open(root).close()
    except CkptError:
        repair_catalog(root, how=how)  # type: ignore[arg-type]
        ckptfmt.open(root).close()


@pytest.mark.slow
@pytest.mark.parametrize(("how", "timing"), CASES)
def test_killed_at_every_operation_on_storage(root: Path, tmp_path: Path, how: str, timing: str) -> None:
    after = _prepare(root, how)
    kept = root.rename(tmp_path / "kept")
    backend_for = connect.backend_for
    number, reached = 0, 0
    while True:
        number += 1
        shutil.copytree(kept, root)
        seen = []

        def faulty(url: Any, *args: Any, nth: int = number, seen: list[int] = seen, **options: Any) -> Any:
            def counts(call: Any) -> bool:
                seen.extend([1] if call.mutates else [])
                return bool(call.mutates and len(seen) == nth)

            fault = Fault(error=Killed, timing=timing, when=counts, crash=True)  # type: ignore[arg-type]
            return FaultyBackend(backend_for(url, *args, **options), fault)

        try:
            with _patched(connect, "backend_for", faulty):
                repair_catalog(root, how=how)  # type: ignore[arg-type]
        except Killed:
            reached += 1
            if how != "adopt":  # before the last transaction nothing takes it for a catalog
                with pytest.raises(CkptError):
                    ckptfmt.open(root)
            _finish(root, how)
            assert_sound(root, after)
            shutil.rmtree(root)
            continue
        break
    assert reached >= 4, "the claim and two hints, with their folders"
    assert_sound(root, after)


def _killed_at(nth: int, done: list[str]) -> Callable[..., int]:
    execute = SqliteSession.execute

    def execute_or_die(self: SqliteSession, statement: str, **values: Any) -> int:
        done.append(statement)
        if len(done) == nth:
            raise Killed
        return execute(self, statement, **values)

    return execute_or_die


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "sparse"),
    [
        ("rebuild", 1),
        *(pytest.param(how, sparse, marks=SLOW) for how, sparse in [("rebuild", 6), ("merge", 6), ("adopt", 6)]),
    ],
)
def test_killed_within_the_transaction(root: Path, tmp_path: Path, how: str, sparse: int) -> None:
    after = _prepare(root, how)
    kept = root.rename(tmp_path / "kept")
    nth, reached = 1, 0
    while True:
        shutil.copytree(kept, root)
        done: list[str] = []
        try:
            with _patched(SqliteSession, "execute", _killed_at(nth, done)):
                repair_catalog(root, how=how)  # type: ignore[arg-type]
        except Killed:
            reached += 1
            _finish(root, how)
            assert_sound(root, after)
            shutil.rmtree(root)
            nth += 1 + nth // sparse  # every one at the beginning, then a sample
            continue
        break
    assert reached >= 5
    assert_sound(root, after)
    goes_on(root, 0)


@pytest.mark.parametrize("step", ["set_aside", "open_catalog", "rebuild"])
def test_killed_between_the_steps(root: Path, step: str) -> None:
    """After the damaged file was put aside, after the new one was made, after everything was done."""
    from ckptfmt.cli import repair as room

    after = _prepare(root, "rebuild")
    place = room.repair if step == "set_aside" else room
    call = getattr(place, step)

    def die(*args: Any, **options: Any) -> None:
        call(*args, **options)
        raise Killed

    with _patched(place, step, die), pytest.raises(Killed):
        repair_catalog(root, how="rebuild")
    assert (root / "catalog.sqlite.aside-1").read_bytes() == b"garbage" * 5000
    _finish(root, "rebuild")
    assert_sound(root, after)
