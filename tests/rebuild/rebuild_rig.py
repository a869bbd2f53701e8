"""Repositories with a history, what one must look like after a rebuild, and ways to lose a catalog."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

import ckptfmt
from ckptfmt import connect
from ckptfmt.catalog.upgrade import check
from ckptfmt.engine import process
from ckptfmt.engine.keep.gc import collect, retire
from ckptfmt.engine.site import Site
from ckptfmt.format.states import State
from ckptfmt.ports.records import GenerationRecord, LaunchRecord, LaunchRequest

Told = tuple[Any, ...]


def state(seed: int) -> dict[str, Any]:
    return {"w": np.random.default_rng(seed).standard_normal(300), "seed": seed}


def assert_state(found: Any, seed: int) -> None:
    assert found["seed"] == seed
    assert found["w"].tobytes() == state(seed)["w"].tobytes()


@contextlib.contextmanager
def site_of(root: Path | str, catalog: str | None = None, mode: connect.Mode = "w") -> Iterator[Site]:
    connection = connect.open_site(root, mode=mode, catalog=catalog, storage_options=None)
    try:
        yield connection.site
    finally:
        connection.close()


def save(root: Path, *seeds: int, run: str = "train", catalog: str | None = None) -> list[int]:
    """Save states in one launch, the seed as the step; return the ids."""
    with ckptfmt.open(root, catalog=catalog) as repository, repository.checkpointer(run) as checkpointer:
        return [checkpointer.save(state(seed), step=seed).result().id for seed in seeds]


def launch(site: Site, run: str) -> LaunchRecord:
    request = LaunchRequest(
        token=uuid.uuid4().hex,
        host=process.host_name(),
        pid=os.getpid(),
        boot_id=process.boot_id(),
        pid_started=process.pid_started(os.getpid()),
    )
    return site.sql().acquire_launch(run, request, lease_seconds=60.0)


def abort(site: Site, run: str = "train", *, step: int = 77) -> GenerationRecord:
    """A generation that wrote a pack and was aborted."""
    held = launch(site, run)
    key = uuid.uuid4().hex
    row = (
        site.sql().begin_save(
            held.id, n=0, step=step, key=key, ranks=[0], deadline_seconds=None, fence=held.fence, token=held.token
        )
    ).generation
    folder = f"runs/{row.run_key}/{row.key}"
    site.backend.make_folder(folder)
    site.backend.create(f"{folder}/r00000-p000.safetensors", b"x" * 500)
    row = site.sql().abort(row.id, stage="persist", rank=0, reason="disk on fire", fence=held.fence)
    site.sql().close_launch(held.id)
    return row


def sweep(site: Site) -> None:
    collect(site, dry_run=False, grace=timedelta(0))


def make_history(root: Path, catalog: str | None = None) -> None:
    """Two runs; committed, tagged, swept, retired and aborted generations."""
    save(root, 10, 20, 30, 40, catalog=catalog)
    save(root, 5, run="other", catalog=catalog)
    with site_of(root, catalog) as site:
        retire(site, 1)
        abort(site)
        sweep(site)
        retire(site, 2)
        abort(site, step=78)
        site.sql().tag(3, "best")
    save(root, 50, 45, catalog=catalog)  # the last goes back: order is not that of steps


def told(site: Site) -> dict[str, list[Told]]:
    """What a catalog says of each run, as far as storage proves it: committed ones in their order."""
    catalog = site.sql()
    return {
        run.name: [
            (
                *(r.id, r.key, r.step, r.epoch, r.commit_seq, r.parent_key, r.nbytes, r.world_size, r.save_number),
                *(r.manifest_name, r.manifest_digest, r.manifest_bytes, r.committed_at, r.commit_fence),
                *(tuple(catalog.packs(r.id)), r.proven_at is not None, r.quarantined_at is None),
            )
            for r in catalog.generations(run=run.name, states=[State.COMMITTED])
        ]
        for run in catalog.runs()
    }


def closed(site: Site) -> dict[str, str]:
    """Key -> state of the generations that are not committed any more, or never were, and have a verdict."""
    rows = site.sql().generations(states=[State.RETIRED, State.DELETED])
    return {row.key: row.state.value for row in rows}


def assert_sound(root: Path, before: dict[str, list[Told]], catalog: str | None = None) -> None:
    """The same committed generations in the same order, each of which loads to the last bit."""
    assert check(catalog or f"sqlite:///{root}/catalog.sqlite").problems == ()
    with site_of(root, catalog) as site:
        assert told(site) == before
    with ckptfmt.open(root, mode="r", catalog=catalog) as repository:
        for run, rows in before.items():
            listed = repository.generations(run=run)
            assert [info.id for info in listed] == [row[0] for row in rows]
            for info in listed:
                assert_state(repository.generation(info.id).load(), info.step)
            if rows:
                assert repository.latest(run).id == rows[0][0]
                assert ckptfmt.load(root, run=run, catalog="none")["seed"] == rows[0][2]


def goes_on(root: Path, used: int, catalog: str | None = None) -> None:
    """Save, restore and gc work; the hold first keeps everything; no id was handed out before."""
    (new,) = save(root, 99, catalog=catalog)
    assert new > used
    with ckptfmt.open(root, catalog=catalog) as repository:
        into = {"w": np.zeros(300), "seed": 0}
        with repository.checkpointer("train") as checkpointer:
            done = checkpointer.restore(into)
        assert done is not None
        assert (done.generation_id, done.step) == (new, 99)
        assert_state(into, 99)
        held = repository.gc(dry_run=False)
        assert held.items == ()
        assert "train" in held.held
    with site_of(root, catalog) as site:
        for run in site.sql().runs():
            site.sql().set_retention_hold(run.name, False)
        sweep(site)
        assert site.sql().generations(states=[State.RETIRED]) == []
    with ckptfmt.open(root, mode="r", catalog=catalog) as repository:
        for info in repository.generations():
            assert_state(repository.generation(info.id).load(), info.step)
