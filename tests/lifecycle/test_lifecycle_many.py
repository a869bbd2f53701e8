"""Sixteen processes on one catalog, for as long as a test may take: nobody meets a lock, nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from lifecycle_rig import run_child

HAMMER = """
import os, sys, time
import ckptfmt.catalog.sql
from ckptfmt.catalog.open import open_catalog
from ckptfmt.testing.catalog_job import REPOSITORY, Job
from forked import at_once
from quick_catalogs import quick_catalogs
url, seconds, processes = f"sqlite:///{sys.argv[1]}", float(sys.argv[2]), int(sys.argv[3])

def work(number):
    catalog = open_catalog(url, repository=REPOSITORY, display_url="/ckpts", mode="w", create=False)
    reader = open_catalog(url, repository=REPOSITORY, display_url="/ckpts", mode="r", create=False)
    run, until, saves = f"run-{number}", time.monotonic() + seconds, 0
    job = Job.start(catalog, run, pid=number)
    while saves < 2 or time.monotonic() < until:
        saved = job.proven(saves)
        saves += 1
        assert reader.latest(run).id == saved.id
        row = catalog.open_reader(saved.id, host="here", pid=number, ttl_seconds=60)
        catalog.renew_lease(job.launch.id, lease_seconds=60, last_step=saves)
        reader.view("latest_committed")
        catalog.close_reader(row)
        if saves % 5 == 0:
            job = job.taken_over()
    assert [found.step for found in reader.generations(run=run)] == list(reversed(range(saves)))
    return saves

with quick_catalogs():  # nothing here survives a power cut: the locks have the more to do
    print(*at_once(work, processes))
"""


@pytest.mark.parametrize(("processes", "seconds"), [(6, 0.5), pytest.param(16, 30, marks=pytest.mark.long)])
def test_many_processes_on_one_catalog_meet_no_lock(tmp_path: Path, processes: int, seconds: float) -> None:
    from ckptfmt.catalog.open import open_catalog
    from ckptfmt.testing.catalog_job import REPOSITORY

    path = tmp_path / "catalog.sqlite"
    open_catalog(f"sqlite:///{path}", repository=REPOSITORY, display_url="/ckpts", mode="w", create=True).close()
    status, out, err = run_child(HAMMER, path, seconds, processes, timeout=seconds + 60)
    assert status == 0, err
    assert "locked" not in err
    saves = [int(line) for line in out.split()]
    assert len(saves) == processes
    assert min(saves) >= 2
