"""Many ranks' parts: holders, ties, ranks that lack something, and what their disagreements are called."""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import prod
from typing import Any

import manifest_fixtures as fix
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfmt.errors import FormatError, Mismatch
from ckptfmt.format.boxes import Box
from ckptfmt.format.index import Index
from ckptfmt.format.manifest import Manifest, decode_manifest
from ckptfmt.format.merge import merge_parts
from ckptfmt.format.part import Part, decode_part, encode_part
from ckptfmt.format.part_reader import PartReader
from ckptfmt.format.tables import BoxTable, ClaimTable, TensorTable

Held = dict[str, tuple[tuple[int, ...], Sequence[tuple[Box, bool]]]]
"""Tensor name -> global shape, and (box, whether this rank writes it) of each box held here."""


def part_of(rank: int, world: int, held: Held, **change: Any) -> Part:
    """A part with one pack; all tensors are uint8, and a box's bytes are those of its tensor's name and corner."""
    kinds = change.pop("kinds", {})
    digest_of = change.pop("digest_of", {})
    tensors, boxes, claims = TensorTable(), BoxTable(), ClaimTable()
    end = fix.HEAD
    for row, (name, (shape, pieces)) in enumerate(held.items()):
        kind = kinds.get(name, "sharded")
        tensors.name.append(name)
        tensors.kind.append(kind)
        tensors.rank.append(rank if kind == "per_rank" else -1)
        tensors.dtype.append("uint8")
        tensors.shape.append(shape)
        for (start, size), writes in pieces:
            table: BoxTable | ClaimTable = boxes if writes else claims
            nbytes = prod(size)
            table.tensor.append(row)
            table.start.append(start)
            table.size.append(size)
            table.digests.append(digest_of.get(name, fix.hexes(bytes([len(name)]) * nbytes)))
            if writes:
                boxes.pack.append(0)
                boxes.offset.append(end)
                end += nbytes
    fields: dict[str, Any] = {
        "packs": [fix.pack_row(name=f"r{rank:05d}-p000.safetensors", rank=rank, nbytes=max(end, fix.HEAD + 1))],
        "tensors": tensors,
        "boxes": boxes,
        "claims": claims,
        "tree": {
            "dict": [
                [name, {"tensor": name}] for name, kind in zip(held, tensors.kind, strict=True) if kind != "per_rank"
            ]
        },
    }
    return fix.part(rank, world, **fields | change)


def merge(*parts: Part, members: Sequence[int] | None = None, world_size: int | None = None) -> Manifest:
    reader = PartReader()
    read = [reader.read(encode_part(part)) for part in parts]
    assert read == [decode_part(encode_part(part)) for part in parts]
    found = merge_parts(
        read, id=7, repository=fix.UUID, run="llama", parent=None, members=members, world_size=world_size
    )
    assert decode_manifest(fix.encoded(found.manifest)) == found.manifest
    return found.manifest


def rows(first: int, count: int, width: int = 2) -> Box:
    return (first, 0), (count, width)


def boxes_in(manifest: Manifest, name: str) -> list[tuple[Box, int]]:
    return [((box.start, box.size), box.pack.rank) for box in fix.found(Index(manifest), name).boxes]


def test_replicas_of_a_share() -> None:
    """Two groups of two ranks; within a group each box has one writer."""
    halves = [rows(0, 3), rows(3, 2)]
    parts = [part_of(rank, 4, {"w": ((5, 2), [(halves[rank % 2], rank in (0, 3))])}) for rank in range(4)]
    assert boxes_in(merge(*parts), "w") == [(halves[0], 0), (halves[1], 3)]


def test_several_boxes_of_one_rank() -> None:
    first = part_of(0, 2, {"w": ((4, 2), [(rows(0, 1), True), (rows(2, 1), True)])})
    second = part_of(1, 2, {"w": ((4, 2), [(rows(1, 1), True), (rows(3, 1), True)])})
    assert boxes_in(merge(first, second), "w") == [(rows(0, 1), 0), (rows(1, 1), 1), (rows(2, 1), 0), (rows(3, 1), 1)]


def test_a_rank_that_holds_nothing_lists_the_tensor() -> None:
    parts = [part_of(rank, 3, {"w": ((2, 2), [(rows(rank, 1), True)] if rank < 2 else [])}) for rank in range(3)]
    assert boxes_in(merge(*parts), "w") == [(rows(0, 1), 0), (rows(1, 1), 1)]
    for kind in ("replicated", "per_rank"):
        with pytest.raises(FormatError, match="'w' has neither a box nor a claim"):
            encode_part(part_of(2, 3, {"w": ((2, 2), [])}, kinds={"w": kind}))


def test_ties_are_told_by_those_who_hold_something() -> None:
    """Rank 1 has no row of either tensor, and so can't tell that they are one."""
    tree = {"dict": [["w", {"tensor": "w"}], ["head", {"tensor": "head"}]]}
    first = part_of(0, 2, {"w": ((1, 2), [(rows(0, 1), True)])}, aliases={"head": "w"}, tree=tree)
    second = part_of(1, 2, {"w": ((1, 2), []), "head": ((1, 2), [])}, tree=tree)
    for parts in ((first, second), (second, first)):
        manifest = merge(*parts)
        assert manifest.tensors.name == ["w"]
        assert manifest.aliases == {"head": "w"}
    untied = part_of(1, 2, {"w": ((1, 2), []), "head": ((1, 2), [(rows(0, 1), True)])}, tree=tree)
    with pytest.raises(Mismatch, match="'head' is tied to 'w' on rank 0, and a tensor of its own on rank 1; "):
        merge(first, untied)


def test_ties_of_what_each_rank_keeps_for_itself() -> None:
    """All that have both have them tied, or none: a manifest has one list of ties."""
    one: Held = {"mine.a": ((2,), [(((0,), (2,)), True)])}
    both = one | {"mine.b": ((2,), [(((0,), (2,)), True)])}
    kinds = {"mine.a": "per_rank", "mine.b": "per_rank"}
    nodes = [{"tensor": "mine.a"}, {"tensor": "mine.b"}]

    def tied(rank: int) -> Part:
        return part_of(rank, 4, one, kinds=kinds, aliases={"mine.b": "mine.a"}, per_rank={"mine": nodes})

    def untied(rank: int) -> Part:
        return part_of(rank, 4, both, kinds=kinds, per_rank={"mine": nodes})

    def lone(rank: int) -> Part:
        return part_of(rank, 4, one, kinds=kinds, per_rank={"mine": nodes[:1]})

    manifest = merge(tied(0), lone(1), tied(2), tied(3))
    assert manifest.aliases == {"mine.b": "mine.a"}
    words = "'mine.b' is tied to 'mine.a' on {}, and a tensor of its own on {}; tie it on all ranks"
    for parts, ties, others in (
        ((tied(0), untied(1), lone(2), untied(3)), "rank 0", "ranks 1, 3"),
        ((untied(0), tied(1), tied(2), lone(3)), "ranks 1, 2", "rank 0"),
    ):
        with pytest.raises(Mismatch) as caught:
            merge(*parts)
        (problem,) = caught.value.problems
        assert problem.startswith(words.format(ties, others))


def test_what_one_rank_keeps_for_itself_is_common_to_no_others() -> None:
    held: Held = {"x": ((2,), [(((0,), (2,)), True)])}
    own = {"kinds": {"x": "per_rank"}}
    parts = [part_of(rank, 4, held, **({} if rank == 2 else own)) for rank in range(4)]
    with pytest.raises(Mismatch) as caught:
        merge(*parts)
    assert caught.value.problems[0].startswith(
        "tensor 'x' is sharded on rank 2, but kept for itself by ranks 0, 1, 3; all ranks have to put it into"
    )


def test_many_ranks_without_any_tensor() -> None:
    manifest = merge(*(part_of(rank, 40, {}) for rank in range(40)))
    assert (len(manifest.ranks), manifest.boxes.tensor) == (40, [])


class Looked(tuple[int, ...]):
    """An extent that counts how often it is compared."""

    looks = 0

    def __eq__(self, other: object) -> bool:
        Looked.looks += 1
        return tuple.__eq__(self, other)

    def __lt__(self, other: tuple[int, ...]) -> bool:
        Looked.looks += 1
        return tuple.__lt__(self, other)

    __hash__ = tuple.__hash__


def test_of_many_boxes_at_one_place_a_claimed_one_is_found_soon() -> None:
    """Only boxes of no elements can begin at one place."""
    count = 1500
    sizes = [Looked((0, width)) for width in range(count)]
    parts = [part_of(rank, 2, {"w": ((0, count), [(((0, 0), size), not rank) for size in sizes])}) for rank in (0, 1)]
    Looked.looks = 0
    found = merge_parts(parts, id=7, repository=fix.UUID, run="llama", parent=None).manifest
    assert found.boxes.size == sizes
    assert count < Looked.looks < 100 * count
    parts[1].claims.size[700] = (0, count)
    with pytest.raises(
        Mismatch, match=rf"'w', box \[0, 0\]\+\[0, {count}\]: rank 1 holds a replica that no rank wrote"
    ):
        merge_parts(parts, id=7, repository=fix.UUID, run="llama", parent=None)


def test_what_only_some_ranks_have_is_no_replica() -> None:
    both = {"w": ((2,), [(((0,), (2,)), True)])}
    more = both | {"x": ((3,), [(((0,), (3,)), True)])}
    kinds = {"w": "replicated", "x": "replicated"}
    with pytest.raises(Mismatch, match=r"'x' is in the state of rank 1, but not in that of ranks 0, 2; .*Sharded"):
        merge(*(part_of(rank, 3, more if rank == 1 else both, kinds=kinds) for rank in range(3)))
    merge(*(part_of(rank, 3, more if rank == 1 else both, kinds=kinds | {"x": "sharded"}) for rank in range(3)))


def test_claims_that_nobody_wrote_tell_who_lacks_the_tensor() -> None:
    claim = {"x": ((3,), [(((0,), (3,)), False)])}
    kinds = {"x": "replicated"}
    with pytest.raises(
        Mismatch, match=r"'x', box \[0\]\+\[3\]: ranks 0, 2 hold a replica that no rank wrote; .* rank 1$"
    ):
        merge(part_of(0, 3, claim, kinds=kinds), part_of(1, 3, {}), part_of(2, 3, claim, kinds=kinds))


def test_all_ranks_that_differ_are_named() -> None:
    def one(rank: int, **change: Any) -> Part:
        return part_of(rank, 4, {"b": ((3,), [(((0,), (3,)), rank == 0)])}, kinds={"b": "replicated"}, **change)

    other = {"b": fix.hexes(b"xyz")}
    with pytest.raises(Mismatch) as caught:
        merge(one(0), one(1, digest_of=other), one(2), one(3, digest_of=other))
    (problem,) = caught.value.problems
    assert "tensor 'b', box [0]+[3]: the replicas of ranks 1, 3 differ from that of rank 0" in problem


def test_replicas_that_are_not_compared() -> None:
    def one(rank: int, digests: str, **change: Any) -> Part:
        held: Held = {"b": ((3,), [(((0,), (3,)), rank == 0)])}
        digest_of = {"b": digests} if rank else {}
        return part_of(rank, 2, held, kinds={"b": "replicated"}, digest_of=digest_of, **change)

    off = {"replica_check": "off"}
    assert boxes_in(merge(one(0, "", **off), one(1, "", **off)), "b") == [(((0,), (3,)), 0)]
    with pytest.raises(FormatError, match=r"claims: .*digests"):
        encode_part(one(1, ""))
    with pytest.raises(FormatError, match="they have digests"):
        encode_part(one(1, fix.hexes(b"xyz"), **off))
    with pytest.raises(FormatError, match="replicas are compared on rank 0, but not compared on rank 1"):
        merge(one(0, ""), one(1, "", **off))


def test_some_ranks_save() -> None:
    parts = [part_of(rank, 8, {"w": ((4, 2), [(rows(2 * (rank - 4), 2), True)])}) for rank in (4, 5)]
    manifest = merge(*parts, members=(4, 5), world_size=8)
    assert [row.rank for row in manifest.ranks] == list(range(8))
    with pytest.raises(FormatError, match=r"one part of each of 8 ranks: 6 missing \(0, 1, 2, 3, 6, 7\)"):
        merge(*parts)
    with pytest.raises(FormatError, match=r"2 ranks: 1 missing \(6\), 1 unexpected \(5\)"):
        merge(*parts, members=(4, 6), world_size=8)


def test_the_size_of_the_world_is_not_taken_from_a_part() -> None:
    """Nothing of that size may be made before it is compared."""
    held: Held = {"w": ((4, 2), [(rows(0, 4), True)])}
    for world in (9, 2**62):
        one = part_of(4, world, held)
        with pytest.raises(FormatError, match=f"world_size is {world} on rank 4, but its launch has 8 ranks"):
            merge(one, members=(4,), world_size=8)
        with pytest.raises(FormatError, match=f"world_size is {world} on rank 4, but its launch has 1 ranks"):
            merge(one, members=(4,))
        with pytest.raises(FormatError, match=rf"{world} ranks: {world - 1} missing \(0, 1, 2, 3, 5, 6, 7, 8"):
            merge(one)


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (rows(1, 2), r"'w': boxes overlap.*; ranks 0 and 1 wrote boxes that overlap"),
        (
            rows(3, 1),
            r"'w': the boxes hold 6 of 8 .*; written: \[0, 0\]\+\[2, 2\] by rank 0, \[3, 0\]\+\[1, 2\] by rank 1",
        ),
        (((2, 1), (2, 1)), r"'w': the boxes hold 6 of 8"),
        (rows(3, 2), r"lies outside the shape"),
    ],
)
def test_boxes_that_do_not_tile(second: Box, words: str) -> None:
    with pytest.raises(FormatError, match=words):
        merge(part_of(0, 2, {"w": ((4, 2), [(rows(0, 2), True)])}), part_of(1, 2, {"w": ((4, 2), [(second, True)])}))


def test_a_tensor_of_which_nobody_holds_a_box() -> None:
    with pytest.raises(FormatError, match="'w': no box covers"):
        merge(*(part_of(rank, 2, {"w": ((4, 2), [])}) for rank in range(2)))


@st.composite
def grids(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A tensor and a tiling of it by planes along each dimension."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    boxes: list[Box] = [((), ())]
    for extent in shape:
        cuts = sorted(draw(st.sets(st.integers(1, extent), max_size=3)) | {extent})
        spans = list(zip([0, *cuts], [b - a for a, b in zip([0, *cuts], cuts, strict=False)], strict=False))
        boxes = [((*start, first), (*size, count)) for start, size in boxes for first, count in spans]
    return shape, boxes


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.lists(grids(), min_size=1, max_size=4), st.integers(1, 5), st.randoms(use_true_random=False))
def test_any_shares_of_any_tilings(tensors: list[tuple[Any, list[Box]]], world: int, chance: random.Random) -> None:
    """Each box goes to some ranks, one of which writes it; then something is bent, and never passes."""
    held: list[dict[str, tuple[Any, list[tuple[Box, bool]]]]] = [{} for _ in range(world)]
    for number, (shape, boxes) in enumerate(tensors):
        for rank in held:
            rank[f"t{number}"] = (shape, [])
        for box in boxes:
            holders = chance.sample(range(world), chance.randint(1, world))
            for rank in holders:
                held[rank][f"t{number}"][1].append((box, rank == holders[0]))
    for one in held:
        for _, pieces in one.values():
            pieces.sort()
    parts = [part_of(rank, world, one) for rank, one in enumerate(held)]
    manifest = merge(*parts)
    for number, (_, boxes) in enumerate(tensors):
        assert [box for box, _ in boxes_in(manifest, f"t{number}")] == sorted(boxes)
    number = chance.randrange(len(tensors))
    owners = [rank for rank in range(world) if any(writes for _, writes in held[rank][f"t{number}"][1])]
    rank = chance.choice(owners)
    shape, pieces = held[rank][f"t{number}"]
    at = chance.choice([i for i, (_, writes) in enumerate(pieces) if writes])
    (start, size), _ = pieces[at]
    axis = chance.randrange(len(shape))
    bent = tuple(x + (i == axis) * chance.choice([-1, 1]) for i, x in enumerate(start))
    bend = chance.choice(["missing", "shifted", "shorter"])
    if bend == "missing":
        pieces.pop(at)
    elif bend == "shifted":
        pieces[at] = ((bent, size), True)
    else:
        pieces[at] = ((start, tuple(n - (i == axis) for i, n in enumerate(size))), True)
    bad = part_of(rank, world, {**held[rank], f"t{number}": (shape, sorted(pieces))})
    with pytest.raises((FormatError, Mismatch), match=f"t{number}"):
        merge(*parts[:rank], bad, *parts[rank + 1 :])
