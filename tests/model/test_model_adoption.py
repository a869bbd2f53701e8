"""What the explorer found in the library, and what was mended since."""

from __future__ import annotations

import sqlite3

import pytest
from lifecycle_rig import Place, Process, assert_state, state_of

import ckptfmt
from ckptfmt.engine.keep.recover import adopt
from ckptfmt.errors import BackendError, CatalogError
from ckptfmt.format.states import State
from ckptfmt.testing.faults import Fault


def _committed_but_for_its_hint(place: Place) -> Process:
    """A save dies right after COMMIT.json; then the catalog is put back to before its commit."""
    process = place.open()
    copy = sqlite3.connect(":memory:")

    def keep_a_copy() -> CatalogError:
        source = sqlite3.connect(process.site.sql().url.removeprefix("sqlite:///"))
        source.backup(copy)
        source.close()
        return CatalogError("the answer was lost", transient=True)

    process.catalog.add(Fault("mark_durable", error=keep_a_copy, timing="after"))
    process.backend.add(Fault("create", error=process.kill, timing="before", when=lambda call: "/commits/" in call.key))
    pending = process.checkpointer().save(state_of(1), step=1)
    assert pending is not None
    pending.exception()
    fresh = place.open()
    target = sqlite3.connect(fresh.site.sql().url.removeprefix("sqlite:///"))
    copy.backup(target)
    target.close()
    copy.close()
    assert fresh.row().state is State.DURABLE
    return fresh


def test_an_adopted_generation_has_its_hint_before_its_row_says_that_it_is_proven(place: Place) -> None:
    """Else a crash in between leaves a proven generation that nobody finds without the database."""
    fresh = _committed_but_for_its_hint(place)
    fresh.catalog.add(Fault("adopt", error=fresh.kill, timing="after"))
    with pytest.raises((CatalogError, BackendError)):
        adopt(fresh.site, fresh.row(), fence=1)
    last = place.open()
    row = last.row()
    assert (row.state, row.proven_at is not None) == (State.COMMITTED, True)
    with ckptfmt.open(place.url, mode="r", catalog="none") as by_proof:
        assert_state(by_proof.latest("run").load(), 1)
