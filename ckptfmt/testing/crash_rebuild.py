"""A lost catalog is rebuilt from storage, and the process that does it ends. Rebuilding as one more door, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from ckptfmt import connect
from ckptfmt.catalog.open import open_catalog
from ckptfmt.cli import repair
from ckptfmt.engine.keep import gc
from ckptfmt.errors import InvalidInput
from ckptfmt.format.states import State
from ckptfmt.ports.backend import Backend
from ckptfmt.ports.catalog import Catalog
from ckptfmt.testing.crash_checks import Door
from ckptfmt.testing.crash_life import Life, Place
from ckptfmt.testing.crash_scenarios import RUN, Scenario, Told, commit, leave, sample_state

__all__ = ["rebuild_door", "rebuilding"]

Lose = Callable[[Place], None]
"""Takes the catalog of a place away."""


def rebuilding(lose: Lose) -> Scenario:
    """Two generations committed, one retired, one that was given up and swept; then the catalog is lost."""

    def prepare(place: Place) -> Told:
        told = Told()
        for step in (1, 2, 3):
            commit(place, told, sample_state(step), step)
        leave(place, 4, "create", ".part.json")
        life = Life(place)
        life.repository.recover()
        life.repository.gc(dry_run=False)
        gc.retire(life.site, next(row.id for row in life.site.sql().generations(run=RUN) if row.step == 1))
        life.end()
        told.failed.add((RUN, 4))
        told.committed.discard((RUN, 1))
        told.failed.add((RUN, 1))  # it has its tombstone: by no door does it open again
        lose(place)
        return told

    return Scenario("rebuild", prepare, _rebuild, repair=_again, opened=False)


def _rebuild(life: Life, told: Told) -> None:
    """Opens storage and catalog by itself: what it opens is watched."""
    backend_for = connect.backend_for

    def watched_backend(*arguments: Any, **named: Any) -> Backend:
        return life.watched_backend(backend_for(*arguments, **named))

    def watched_catalog(*arguments: Any, **named: Any) -> Catalog:
        return life.watched_catalog(open_catalog(*arguments, **named))

    with patch.object(connect, "backend_for", watched_backend), patch.object(repair, "open_catalog", watched_catalog):
        repair.repair_catalog(life.place.url, how="rebuild", catalog=life.place.catalog)


def _again(place: Place) -> None:
    """What the operator does: the same once more, unless it had come to its end; then the hold is taken off."""
    try:
        repair.repair_catalog(place.url, how="rebuild", catalog=place.catalog)
    except InvalidInput as error:
        if "nothing to rebuild" not in str(error):
            raise
    life = Life(place)
    for run in life.site.sql().runs():
        life.site.sql().set_retention_hold(run.name, False)
    life.end()


def rebuild_door(lose: Lose) -> Door:
    """The catalog is lost and rebuilt: it says what it said before."""

    def look(place: Place, told: Told) -> list[str]:
        before = _committed(place)
        lose(place)
        repair.repair_catalog(place.url, how="rebuild", catalog=place.catalog)
        after = _committed(place)
        return [] if after == before else [f"by rebuild: {sorted(after)} is committed, before it was {sorted(before)}"]

    return look


def _committed(place: Place) -> set[tuple[str, int, str]]:
    with place.open("r") as repository:
        rows = repository._connection.site.sql().generations(states=[State.COMMITTED])
        return {(row.run, row.step, row.key) for row in rows}
