"""Parts of many ranks become one manifest, or an error that names the tensor and the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import manifest_fixtures as fix
import msgspec
import pytest

from ckptfmt.errors import FormatError, InvalidInput, Mismatch
from ckptfmt.format import tree
from ckptfmt.format.index import Index
from ckptfmt.format.manifest import Manifest, decode_manifest
from ckptfmt.format.merge import merge_parts
from ckptfmt.format.part import Part, decode_part, encode_part
from ckptfmt.format.tables import BoxTable, ClaimTable, TensorTable


def merge(*parts: Part) -> Manifest:
    return merge_parts(parts, id=7, repository=fix.UUID, run="llama", parent=None).manifest


def share(rank: int, *, rows: tuple[int, int] = (2, 2), bias: bytes = b"b" * 8, write_bias: bool | None = None) -> Part:
    """Rank ``rank`` of 2: half of w (2 x 3 float32), the replicated b, its own r, and a slot."""
    writes = rank == 0 if write_bias is None else write_bias
    first = sum(rows[:rank])
    table = TensorTable(
        name=["w", "b", "r"],
        kind=["sharded", "replicated", "per_rank"],
        rank=[-1, -1, rank],
        dtype=["uint8", "float64", "uint8"],
        shape=[(sum(rows), 3), (), (rank + 1,)],
    )
    own = rows[rank] * 3
    boxes = BoxTable(
        tensor=[0, 2],
        start=[(first, 0), (0,)],
        size=[(rows[rank], 3), (rank + 1,)],
        pack=[0, 0],
        offset=[fix.HEAD, fix.HEAD + own],
        digests=[fix.hexes(bytes([rank]) * own), fix.hexes(b"r" * (rank + 1))],
    )
    claims = ClaimTable()
    target: BoxTable | ClaimTable = boxes if writes else claims
    at = 1 if writes else 0
    for column, item in {"tensor": 1, "start": (), "size": (), "digests": fix.hexes(bias)}.items():
        getattr(target, column).insert(at, item)
    if writes:
        boxes.pack.insert(1, 0)
        boxes.offset.insert(1, fix.HEAD + 50)
    pairs = [["w", {"tensor": "w"}], ["b", {"tensor": "b"}], ["rng", tree.per_rank("rng")], [f"only {rank}", rank]]
    return fix.part(
        rank,
        2,
        packs=[fix.pack_row(name=f"r{rank:05d}-p000.safetensors", rank=rank)],
        tensors=table,
        boxes=boxes,
        claims=claims,
        tree={"dict": pairs},
        per_rank={"rng": {"tensor": "r"}},
        mesh={"dp": rank},
        metadata={"dict": [["of", rank]]},
    )


def test_two_ranks() -> None:
    parts = [decode_part(encode_part(share(rank))) for rank in (1, 0)]
    manifest = merge(*parts)
    assert decode_manifest(fix.encoded(manifest)) == manifest
    index = Index(manifest)
    assert list(index) == ["w", "b", "r"]
    assert [(b.start, b.size, b.pack.name) for b in fix.found(index, "w").boxes] == [
        ((0, 0), (2, 3), "r00000-p000.safetensors"),
        ((2, 0), (2, 3), "r00001-p000.safetensors"),
    ]
    assert len(fix.found(index, "b").boxes) == 1
    assert fix.found(index, "r", 1).shape == (2,)
    assert [row.mesh for row in manifest.ranks] == [{"dp": 0}, {"dp": 1}]
    assert [pair[0] for pair in manifest.trees.common["dict"]] == ["w", "b", "rng", "only 0", "only 1"]
    assert manifest.trees.per_rank == {"0": {"rng": {"tensor": "r"}}, "1": {"rng": {"tensor": "r"}}}
    assert manifest.metadata == {"dict": [["of", 0]]}


def test_order_of_parts_does_not_matter() -> None:
    assert fix.encoded(merge(share(0), share(1))) == fix.encoded(merge(share(1), share(0)))


def test_one_rank() -> None:
    part = fix.part(tree={"dict": []})
    manifest = merge(part)
    assert (manifest.id, manifest.run, manifest.key, manifest.step) == (7, "llama", fix.KEY, 5)
    assert fix.encoded(manifest)


def test_a_rank_without_rows_takes_part() -> None:
    manifest = merge(share(0, rows=(3, 0)), share(1, rows=(3, 0)))
    w = fix.found(Index(manifest), "w")
    assert w.nbytes == 9
    assert [box.size for box in w.boxes] == [(3, 3), (0, 3)]


def test_replicas_written_twice_are_taken_once() -> None:
    manifest = merge(share(0), share(1, write_bias=True))
    (box,) = fix.found(Index(manifest), "b").boxes
    assert box.pack.rank == 0


@pytest.mark.parametrize("write", [False, True])
def test_replicas_that_differ(write: bool) -> None:
    with pytest.raises(Mismatch) as caught:
        merge(share(0), share(1, bias=b"x" * 8, write_bias=write))
    (problem,) = caught.value.problems
    assert "'b'" in problem
    assert "ranks 0 and 1 differ" in problem
    assert "PerRank" in problem


def test_replicas_that_nobody_wrote() -> None:
    with pytest.raises(Mismatch, match=r"'b'.*ranks 0, 1.*no rank wrote"):
        merge(share(0, write_bias=False), share(1))


Change = Callable[[Part], Any]


def column(name: str, row: int, item: Any) -> Change:
    return lambda part: getattr(part.tensors, name).__setitem__(row, item)


def attribute(name: str, item: Any) -> Change:
    return lambda part: setattr(part, name, item)


BENT: dict[str, tuple[Change, type[Exception], str]] = {
    "another dtype": (column("dtype", 1, "int64"), Mismatch, "'b' is replicated float64.*rank 0.*int64.*rank 1"),
    "another kind": (column("kind", 1, "sharded"), Mismatch, "'b' is replicated"),
    "another shape": (column("shape", 0, (5, 3)), Mismatch, "'w' is"),
    "another step": (attribute("step", 6), FormatError, "step is 5 on rank 0, but 6 on rank 1"),
    "another key": (attribute("key", "f" * 32), FormatError, "key is"),
    "another launch": (attribute("launch", "f" * 32), FormatError, "launch is"),
    "another save": (attribute("save_number", 1), FormatError, "save_number is"),
    "another world": (attribute("world_size", 3), FormatError, "world_size is"),
    "another chunk rule": (attribute("chunk_bytes", 32), FormatError, "chunk_bytes is"),
    "another tie": (attribute("aliases", {"tied": "b"}), Mismatch, "'tied' is tied to 'w'"),
    "another value": (attribute("tree", {"dict": [["w", 5]]}), Mismatch, "w: rank 0 has"),
    "another kind of tree": (attribute("tree", []), Mismatch, "the state: rank 0"),
    "overlap": (lambda p: p.boxes.start.__setitem__(0, (1, 0)), FormatError, "'w'.*overlap"),
}


@pytest.mark.parametrize("case", BENT)
def test_parts_that_do_not_fit(case: str) -> None:
    bend, error, word = BENT[case]
    first, second = share(0), share(1)
    first.aliases = {"tied": "w"}
    bend(second)
    with pytest.raises(error, match=word):
        merge(first, second)


def test_missing_and_doubled_parts() -> None:
    for parts in ([share(0)], [share(1)], [share(0), share(0)], [share(0), share(1), share(1)]):
        with pytest.raises(FormatError, match="one part of each of 2 ranks"):
            merge(*parts)
    with pytest.raises(InvalidInput):
        merge()


def test_all_differences_are_listed() -> None:
    second = share(1, bias=b"x" * 8)
    second.tensors.dtype[0] = "int8"
    with pytest.raises(Mismatch) as caught:
        merge(share(0), second)
    assert len(caught.value.problems) == 2


def test_gap() -> None:
    first = share(0, rows=(2, 2))
    second = share(1, rows=(2, 2))
    second.boxes.start[0] = (3, 0)
    second.boxes.size[0] = (1, 3)
    second.boxes.digests[0] = fix.hexes(b"xyz")
    with pytest.raises(FormatError, match=r"'w'.*9 of 12"):
        merge(first, second)


PART_RULES: dict[str, tuple[Change, str]] = {
    "rank beyond world": (attribute("world_size", 1), "only 1 ranks"),
    "tensor of another rank": (column("rank", 2, 0), "another rank"),
    "pack of another rank": (attribute("packs", [fix.pack_row(rank=0)]), "pack of another rank"),
    "tensor without box or claim": (attribute("claims", ClaimTable()), "neither a box nor a claim"),
    "claim outside": (lambda p: p.claims.start.__setitem__(0, (1,)), "claims"),
    "claim without digest": (lambda p: p.claims.digests.__setitem__(0, ""), "claims"),
    "reference to nothing": (attribute("tree", {"tensor": "x"}), "'x'"),
    "slot to nothing": (attribute("per_rank", {"rng": {"tensor": "x"}}), "'x'"),
    "slot that is not there": (attribute("per_rank", {}), "'rng'"),
}


@pytest.mark.parametrize("case", PART_RULES)
def test_rules_of_a_single_part(case: str) -> None:
    bend, word = PART_RULES[case]
    part = share(1)
    bend(part)
    with pytest.raises(FormatError, match=word):
        encode_part(part)
    with pytest.raises(FormatError, match=word):
        decode_part(msgspec.json.encode(part))


def test_a_part_is_no_manifest() -> None:
    with pytest.raises(FormatError, match="object"):
        decode_manifest(fix.stored(share(0)))
    with pytest.raises(FormatError, match="object"):
        decode_part(msgspec.json.encode(fix.manifest()))
