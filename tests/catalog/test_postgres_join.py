"""A rank that looks for its launch at the moment when the coordinator acquires it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ckptfmt.catalog import launch_ranks
from ckptfmt.catalog.queries import launches
from ckptfmt.testing.catalogs import Job, MakeCatalog, request


def test_a_launch_acquired_between_two_statements_is_joined(
    pg_make_catalog: MakeCatalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """READ COMMITTED: each statement sees what was committed before it, so the run and its launch differ in age."""
    catalog, other = pg_make_catalog(), pg_make_catalog()
    older = Job.start(catalog, world_size=2)
    catalog.close_launch(older.launch.id)
    wanted = replace(request(token="f" * 32), world_size=2)
    acquired = []

    def by_token(*place: Any) -> Any:
        if not acquired:
            acquired.append(other.acquire_launch(older.run, wanted, lease_seconds=30))
        return launches.by_token(*place)

    # In the joining room alone: the coordinator asks the same question.
    monkeypatch.setattr(launch_ranks, "launches", type("Asked", (), {"by_token": staticmethod(by_token)}))
    mine = replace(wanted, pid=wanted.pid + 1)
    joined = catalog.join_launch(older.run, mine, rank=1)
    assert joined == acquired[0]
    assert joined.fence == older.launch.fence + 1
