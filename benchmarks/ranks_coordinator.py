"""C1 to C5 of one save of a simulated world, as its coordinator goes through them, in a fresh process.

    python -m benchmarks.ranks_coordinator ROOT CATALOG RANKS TENSORS LAYOUT PLACE

Prints one JSON object. The ranks are a second process (``ranks_others``) that writes parts and packs, and reports.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
import subprocess
import sys
import time
from typing import Any

import torch.distributed as dist

import ckptfmt.backends.posix
import ckptfmt.catalog.postgres
import ckptfmt.format.merge
import ckptfmt.torch.store  # noqa: F401
from benchmarks.meter import peak_bytes, reset_peak, resident_bytes
from benchmarks.ranks_timing import Steps, Timed
from benchmarks.ranks_world import PREFIX, RUN, Save
from ckptfmt import connect
from ckptfmt.engine import protocol
from ckptfmt.engine.save.boards import CatalogBoard
from ckptfmt.engine.save.context import Ranks
from ckptfmt.engine.save.launch import acquire
from ckptfmt.engine.save.messages import Messages
from ckptfmt.engine.save.rows import Rows
from ckptfmt.engine.site import Site
from ckptfmt.format import layout
from ckptfmt.ports.coordination import Board, SaveRequest
from ckptfmt.ports.records import GenerationRecord, LaunchRecord
from ckptfmt.torch.store import StoreBoard


def main(root: str, catalog: str, ranks: int, tensors: int, layout_: str, place: str) -> dict[str, Any]:
    connection = connect.open_site(root, mode="w", catalog=catalog, storage_options=None)
    database, storage = Timed(connection.site.sql()), Timed(connection.site.backend)
    site = dataclasses.replace(connection.site, backend=storage, catalog=database)  # type: ignore[arg-type]
    database.ensure_run(RUN, layout.run_key(RUN))
    members = Ranks(0, ranks, tuple(range(ranks)))
    launch = acquire(connection.site.sql(), RUN, token=secrets.token_hex(16), takeover=False, ranks=members)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    board: Board = (
        StoreBoard(server.clone(), PREFIX, world_size=ranks)
        if place == "c10d"
        else CatalogBoard(database, launch.id, world_size=ranks)  # type: ignore[arg-type]
    )
    coordination = (Messages if place == "c10d" else Rows)(site.sql(), launch, members, board)
    save = Save(launch.token)
    others = [str(server.port), root, catalog, str(ranks), str(tensors), layout_, place, launch.token]
    steps = Steps(database, storage)
    before = resident_bytes()
    reset_peak()
    told, row = _commit(site, coordination, launch, save, others, steps)
    peak = peak_bytes()
    database.close_launch(launch.id)
    connection.close()
    return {
        "steps": steps.found,
        "peak": peak,
        "peak_above_start": peak - before,
        "manifest": {"name": row.manifest_name, "bytes": row.manifest_bytes, "key": row.key, "folder": save.folder},
        "others": told,
        "calls": {"database": database.calls, "storage": storage.calls},
        "each": {"database": database.each, "storage": storage.each},
    }


def _commit(
    site: Site, coordination: Messages | Rows, launch: LaunchRecord, save: Save, others: list[str], steps: Steps
) -> tuple[dict[str, Any], GenerationRecord]:
    request = SaveRequest(n=save.n, step=save.step, key=save.key, tags=(), deadline_seconds=3600.0)
    with steps.step("C1"):
        row = coordination.begin(request)
        assert row is not None
        site.backend.make_folder(save.folder)
        coordination.opened(row)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.ranks_others", *others], stdout=subprocess.PIPE, text=True, check=True
    )
    told: dict[str, Any] = json.loads(done.stdout)
    until = time.monotonic() + 600
    with steps.step("C2"):
        assert coordination.gathered(row)
    with steps.step("C3"):
        protocol.settle_lower(site, row, fence=launch.fence, until=until)
        parent = protocol.parent_of(site, row)
        row = protocol.merge(site, row, parent=parent, fence=launch.fence)
    with steps.step("C4"):
        row = protocol.commit(site, row, fence=launch.fence, until=until)
    with steps.step("C5"):
        row = protocol.prove(site, row)
        coordination.announce(row)
    assert row.proven_at is not None
    return told, row


if __name__ == "__main__":
    words = sys.argv[1:]
    print(json.dumps(main(words[0], words[1], int(words[2]), int(words[3]), words[4], words[5])))
