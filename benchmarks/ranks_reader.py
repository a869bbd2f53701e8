"""One rank opens a committed generation of a simulated world and finds its share, in a fresh process.

    python -m benchmarks.ranks_reader ROOT CATALOG RANKS TENSORS LAYOUT RANK MANIFEST

Prints one JSON object. Imports and a first connection are not counted; nothing of the manifest is known before.
``CATALOG`` may be "none": by proof.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import ckptfmt
import ckptfmt.backends.posix
import ckptfmt.catalog.postgres
import ckptfmt.engine.load.restore
import ckptfmt.format.manifest
import ckptfmt.repository
from benchmarks.meter import peak_bytes, reset_peak, resident_bytes
from benchmarks.ranks_world import RUN, World
from ckptfmt.engine.read_plan import plan_reads
from ckptfmt.errors import NotFound
from ckptfmt.format.manifest import decode_manifest


def main(root: str, catalog: str, world: World, rank: int, manifest: Path) -> dict[str, Any]:
    with ckptfmt.open(root, mode="r", catalog=catalog) as repository:
        with contextlib.suppress(NotFound):
            repository.latest("another run")  # its imports
        before = resident_bytes()
        reset_peak()
        began = time.perf_counter(), time.process_time()
        generation = repository.latest(RUN)
        opened = time.perf_counter(), time.process_time()
        boxes = [box for name, share in _wanted(world, rank) for box in generation._opened.tensor(name).meeting(share)]
        plan = plan_reads(boxes)
        ended = time.perf_counter(), time.process_time()
        peak = peak_bytes() - before
        count = len(generation._opened.manifest.boxes.tensor)
    stored = manifest.read_bytes()
    gc.collect()
    decode = time.process_time()
    decode_manifest(stored)
    return {
        "boxes": count,
        "mine": len(boxes),
        "memory_bytes": plan.memory_bytes,
        "open": opened[0] - began[0],
        "open_cpu": opened[1] - began[1],
        "share": ended[0] - opened[0],
        "share_cpu": ended[1] - opened[1],
        "decode_cpu": time.process_time() - decode,
        "peak_above_start": peak,
    }


def _wanted(world: World, rank: int) -> list[tuple[str, Any]]:
    shares = ((name, world.share(rank, shape)) for name, shape in world.shapes)
    return [(name, share) for name, share in shares if share is not None]


if __name__ == "__main__":
    root, catalog, ranks, tensors, layout, rank, manifest = sys.argv[1:]
    world = World(int(ranks), int(tensors), layout)  # type: ignore[arg-type]
    print(json.dumps(main(root, catalog, world, int(rank), Path(manifest))))
