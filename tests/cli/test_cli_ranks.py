"""Generations of several ranks as the command line shows them: kinds, boxes, and whose a value is."""

from __future__ import annotations

import secrets
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_fixtures import ok, ok_json, run
from forked import at_once

import ckptfmt
from ckptfmt import PerRank, Sharded

WHOLE = np.arange(72, dtype=np.float32).reshape(12, 6)


def save_as(url: Path, world_size: int, step: int, token: str, rank: int) -> None:
    each = len(WHOLE) // world_size
    rows = WHOLE[rank * each : (rank + 1) * each].copy()
    state: dict[str, Any] = {
        "w": Sharded(rows, WHOLE.shape, (rank * each, 0)),
        "b": np.ones(3),
        "loader": PerRank({"position": rank, "order": np.full(2, rank)}),
        "epoch": 1,
    }
    with (
        ckptfmt.open(url) as repo,
        repo.checkpointer("train", rank=rank, world_size=world_size, launch=token, coordination="catalog") as saver,
    ):
        saver.save(state, step=step).wait()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Generation 1 was saved by 2 ranks, generation 2 by 3."""
    root = tmp_path_factory.mktemp("ranks") / "ckpts"
    ckptfmt.open(root).close()
    for step, world_size in ((10, 2), (20, 3)):
        at_once(partial(save_as, root, world_size, step, secrets.token_hex(16)), world_size)
    return root


def test_inspect_tells_boxes_and_ranks(url: Path) -> None:
    text = ok("inspect", f"{url}#train@2")
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "w float32 [12, 6] 288 B sharded, 3 boxes" in lines
    assert "b float64 [3] 24 B" in lines
    assert [f"loader.order int64 [2] 16 B rank {rank}" in lines for rank in range(3)] == [True] * 3
    assert any(line.startswith("loader per rank 3 48 B") for line in lines)
    document = ok_json("inspect", f"{url}#train@2", "--tensors")
    assert document["generation"]["world_size"] == 3
    assert [rank["rank"] for rank in document["ranks"]] == [0, 1, 2]
    held = {(line["name"], line["rank"]): (line["kind"], line["boxes"]) for line in document["tensors"]}
    assert held["w", -1] == ("sharded", 3)
    assert held["b", -1] == ("replicated", 1)
    assert held["loader.order", 2] == ("per_rank", 1)
    assert {pack["rank"] for pack in document["packs"]} == {0, 1, 2}


def test_one_tensor_by_its_boxes_or_by_rank(url: Path) -> None:
    text = ok("inspect", f"{url}#train@1", "--tensor", "w")
    assert "sharded in 2 boxes" in text
    assert "box at [6, 0] of size [6, 6]" in text
    assert "r00001-p000.safetensors" in text
    own = ok("inspect", f"{url}#train@1", "--tensor", "loader.order")
    assert "per_rank of rank 0" in own
    assert "per_rank of rank 1" in own
    assert len(ok_json("inspect", f"{url}#train@1", "--tensor", "loader.order")["stored"]) == 2


def test_of_many_boxes_the_first_are_shown(url: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptfmt.cli.tensor_view.BOXES", 1)
    assert "and 2 more boxes: --json" in ok("inspect", f"{url}#train@2", "--tensor", "w")


def test_verify_reads_the_packs_of_all_ranks(url: Path) -> None:
    assert ok_json("verify", f"{url}#train@2")["nbytes"] == WHOLE.nbytes + 24 + 3 * 16
    (pack,) = url.rglob("r00002-p000.safetensors")
    data = pack.read_bytes()
    try:
        pack.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        result = run("verify", f"{url}#train@2")
        assert result.code == 12
        assert "r00002-p000.safetensors" in result.out
    finally:
        pack.write_bytes(data)


def test_diff_of_other_world_sizes(url: Path) -> None:
    """The same values in other boxes: digests cannot tell; what each rank kept comes and goes with the ranks."""
    text = run("diff", f"{url}#train@1", "@2").out
    assert "stored in other boxes or chunks" in text
    assert "loader.order (rank 2)" in text
    document = run("diff", f"{url}#train@1", "@2", "--json").json()
    changes = {(tensor["name"], tensor["rank"]): tensor["change"] for tensor in document["tensors"]}
    assert changes == {
        ("w", -1): "boxes",
        ("b", -1): "unchanged",
        ("loader.order", 0): "unchanged",
        ("loader.order", 1): "unchanged",
        ("loader.order", 2): "added",
    }
    values = {value["path"]: (value["old"], value["new"]) for value in document["values"]}
    assert values["loader.position (rank 2)"] == (None, "2")
