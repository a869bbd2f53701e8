"""A reader that wants one rank's share of a manifest of 300,000 chunks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from reshard_rig import CREATED, KEY, REPOSITORY

import ckptfmt
from ckptfmt.format import checksum, tree
from ckptfmt.format.manifest import Manifest, RankRow, Writer, encode_sound, validate
from ckptfmt.format.tables import BoxTable, PackRow, TensorTable
from ckptfmt.format.trees import Trees

RANKS, TENSORS = 1024, 300
GOAL_SECONDS = 0.5

READER = """
import json, sys, time
from ckptfmt.engine.collector import held_back
from ckptfmt.engine.load.gather import boxes_to_read, shares_of
from ckptfmt.engine.stored import StoredTensors
from ckptfmt.format.index import Index
from ckptfmt.format.manifest import decode_manifest, manifest_digest

stored = open(sys.argv[1], "rb").read()
rank, ranks = int(sys.argv[2]), int(sys.argv[3])
began, cpu = time.perf_counter(), time.process_time()
manifest_digest(stored)
with held_back():
    manifest = decode_manifest(stored)
    tensors = StoredTensors(Index(manifest), [pack.name for pack in manifest.packs])
    shares = []
    for name in manifest.tensors.name:
        row = tensors.find(name, rank)
        each = row.shape[0] // ranks
        shares += shares_of(row, ((rank * each, 0), (each, row.shape[1])))
    boxes = boxes_to_read((), shares)
seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
print(json.dumps([seconds, cpu, len(boxes), sorted({box.pack for box in boxes})]))
"""


def layered() -> Manifest:
    """Layers of nine shapes, each cut into a box for each rank."""
    tensors, boxes = TensorTable(), BoxTable()
    ends = [4096] * RANKS
    for row in range(TENSORS):
        size = (16 * (1 + row % 9), 1024)
        tensors.name.append(f"model.layers.{row // 9}.block{row % 9}.weight")
        tensors.kind.append("sharded")
        tensors.rank.append(-1)
        tensors.dtype.append("bfloat16")
        tensors.shape.append((size[0] * RANKS, size[1]))
        for rank in range(RANKS):
            boxes.tensor.append(row)
            boxes.start.append((rank * size[0], 0))
            boxes.size.append(size)
            boxes.pack.append(rank)
            boxes.offset.append(ends[rank])
            boxes.digests.append(checksum.hex_digest(b"%d %d" % (row, rank)))
            ends[rank] += 2 * size[0] * size[1]
    return Manifest(
        key=KEY,
        step=7,
        launch="b" * 32,
        save_number=0,
        created_at=CREATED,
        writer=Writer(library="test", version="1"),
        packs=[
            PackRow(name=f"r{rank:05d}-p000", rank=rank, nbytes=end, header_bytes=4096, header_digest="0" * 32)
            for rank, end in enumerate(ends)
        ],
        tensors=tensors,
        boxes=boxes,
        repository=REPOSITORY,
        run="r",
        id=1,
        ranks=[RankRow(rank=rank, mesh={"dp": rank}) for rank in range(RANKS)],
        trees=Trees(common={"dict": [[name, tree.reference("tensor", name)] for name in tensors.name]}),
        metadata={"dict": []},
    )


@pytest.mark.slow
def test_one_share_of_300_000_chunks(tmp_path: Path, tell: Callable[[str, str], None]) -> None:
    """In a fresh process, imports aside. The goal holds for a machine that does nothing else."""
    stored = encode_sound(validate(layered()))
    path = tmp_path / "manifest"
    path.write_bytes(stored)
    environment = os.environ | {"PYTHONPATH": str(Path(ckptfmt.__file__).parents[1])}
    answers = []
    for _ in range(3):
        command = [sys.executable, "-c", READER, str(path), "341", str(RANKS)]
        answers.append(json.loads(subprocess.run(command, env=environment, capture_output=True, check=True).stdout))
    seconds, cpu, boxes, packs = min(answers)
    tell(
        "one rank's share of 300,000 chunks",
        f"{len(stored) / 1e6:.1f} MB of manifest, {boxes} boxes: {seconds:.2f} s, {cpu:.2f} s of them at work (goal "
        f"{GOAL_SECONDS} s)",
    )
    assert (boxes, packs) == (TENSORS, ["r00341-p000"])
    assert cpu < 4 * GOAL_SECONDS
