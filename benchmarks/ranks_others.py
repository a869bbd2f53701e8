"""All ranks of a simulated world, one after the other: they write packs and parts, and report as the real ones do.

    python -m benchmarks.ranks_others PORT ROOT CATALOG RANKS TENSORS LAYOUT PLACE TOKEN

Prints one JSON object: part bytes, and with coordination "catalog" what the ranks ask of the database.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.ranks_timing import Timed
from benchmarks.ranks_world import PREFIX, RUN, Save, World, write_ranks
from ckptfmt.engine.save.context import Ranks
from ckptfmt.format import layout
from ckptfmt.ports.coordination import PartReport, SaveRequest


def main(port: int, root: str, catalog: str, world: World, place: str, token: str) -> dict[str, Any]:
    save = Save(token)
    began = time.perf_counter()
    reports = list(write_ranks(world, save, Path(root)))
    told = {"prepared": time.perf_counter() - began, "part_bytes": _part_bytes(world, save, root)}
    if place == "c10d":
        return told | _through_store(port, world, save, reports)
    return told | _through_catalog(root, catalog, world, save, reports)


def _part_bytes(world: World, save: Save, root: str) -> int:
    folder = Path(root, save.folder)
    return sum((folder / layout.part_name(rank)).stat().st_size for rank in range(world.ranks))


def _request(save: Save) -> SaveRequest:
    return SaveRequest(n=save.n, step=save.step, key=save.key, tags=(), deadline_seconds=3600.0)


def _through_store(port: int, world: World, save: Save, reports: list[PartReport]) -> dict[str, Any]:
    import torch.distributed as dist

    from ckptfmt.engine.save.messages import Messages
    from ckptfmt.torch.store import StoreBoard

    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    board = StoreBoard(store, PREFIX, world_size=world.ranks)
    nobody: Any = None  # followers speak to no catalog
    began = time.perf_counter()
    for report in reports:
        ranks = Ranks(max(report.rank, 1), world.ranks, (0, max(report.rank, 1)))
        coordination = Messages(nobody, nobody, ranks, board)
        row = coordination.begin(_request(save))
        assert row is not None
        coordination.report(row, report)
    return {"seconds_a_rank": (time.perf_counter() - began) / world.ranks}


def _through_catalog(root: str, catalog: str, world: World, save: Save, reports: list[PartReport]) -> dict[str, Any]:
    from ckptfmt import connect
    from ckptfmt.engine.save.boards import CatalogBoard
    from ckptfmt.engine.save.rows import Rows

    connection = connect.open_site(root, mode="w", catalog=catalog, storage_options=None)
    database: Any = Timed(connection.site.sql())
    launch = database.live_launch(RUN)
    members = tuple(range(world.ranks))
    began = time.perf_counter()
    for report in reports:
        ranks = Ranks(max(report.rank, 1), world.ranks, members)
        board = CatalogBoard(database, launch.id, world_size=world.ranks)
        coordination = Rows(database, launch, ranks, board)
        row = coordination.begin(_request(save))
        assert row is not None
        coordination.look(row)  # before the packs
        coordination.look(row)  # before the part
        coordination.report(row, report)
        coordination.verdict(row)
    seconds = (time.perf_counter() - began) / world.ranks
    connection.close()
    return {"seconds_a_rank": seconds, "calls_a_rank": sum(database.calls.values()) / world.ranks}


if __name__ == "__main__":
    port, root, catalog, ranks, tensors, layout_, place, token = sys.argv[1:]
    world = World(int(ranks), int(tensors), layout_)  # type: ignore[arg-type]
    print(json.dumps(main(int(port), root, catalog, world, place, token)))
