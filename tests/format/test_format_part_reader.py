"""What parts have in common is read once: with the same answer as reading each for itself, errors included."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import manifest_fixtures as fix
import msgspec
import pytest

from ckptfmt.errors import FormatError
from ckptfmt.format.part import Part, decode_part
from ckptfmt.format.part_reader import PartReader
from ckptfmt.format.tables import BoxTable, TensorTable


def share(rank: int, world: int = 4) -> Part:
    table = TensorTable(
        name=["w", "b", "r"],
        kind=["sharded", "sharded", "per_rank"],
        rank=[-1, -1, rank],
        dtype=["uint8", "uint8", "int64"],
        shape=[(world, 3), (world,), (1,)],
    )
    boxes = BoxTable(
        tensor=[0, 1, 2],
        start=[(rank, 0), (rank,), (0,)],
        size=[(1, 3), (1,), (1,)],
        pack=[0, 0, 0],
        offset=[fix.HEAD, fix.HEAD + 3, fix.HEAD + 8],
        digests=[fix.hexes(bytes([rank]) * n) for n in (3, 1, 8)],
    )
    return fix.part(
        rank,
        world,
        packs=[fix.pack_row(name=f"r{rank:05d}-p000.safetensors", rank=rank)],
        tensors=table,
        boxes=boxes,
        aliases={"tied": "w"},
        tree={"dict": [["w", {"tensor": "w"}], ["b", {"tensor": ["b", "parameter"]}], ["t", {"tensor": "tied"}]]},
        per_rank={"rng": {"tensor": "r"}},
        mesh={"dp": rank},
        metadata={"dict": [["loss", 0.5 + rank]]},
    )


def test_parts_share_what_is_equal() -> None:
    reader = PartReader()
    parts = [reader.read(msgspec.json.encode(share(rank))) for rank in range(4)]
    assert parts == [share(rank) for rank in range(4)]
    for part in parts[1:]:
        assert part.tree is parts[0].tree
        assert part.aliases is parts[0].aliases
        assert part.tensors.name is parts[0].tensors.name
    assert [part.tensors.rank[2] for part in parts] == [0, 1, 2, 3]


Change = Callable[[Part], Any]

BENT: dict[str, Change] = {
    "another tensor": lambda p: p.tensors.name.__setitem__(1, "c"),
    "another shape": lambda p: p.tensors.shape.__setitem__(0, (5, 3)),
    "another dtype": lambda p: p.tensors.dtype.__setitem__(0, "int8"),
    "an unknown dtype": lambda p: p.tensors.dtype.__setitem__(0, "int9"),
    "another rank's tensor": lambda p: p.tensors.rank.__setitem__(2, 0),
    "an owner of what is common": lambda p: p.tensors.rank.__setitem__(0, 2),
    "another tie": lambda p: p.aliases.update(tied="b"),
    "a tie to nothing": lambda p: p.aliases.update(tied="x"),
    "another tree": lambda p: p.tree["dict"].append(["n", 1]),
    "a reference to nothing": lambda p: p.tree["dict"].append(["n", {"tensor": "x"}]),
    "a slot to nothing": lambda p: p.per_rank.update(rng={"tensor": "x"}),
    "another slot": lambda p: p.per_rank.update(more=1),
    "metadata with a tensor": lambda p: p.metadata["dict"].append(["t", {"tensor": "w"}]),
    "a box outside": lambda p: p.boxes.start.__setitem__(0, (4, 0)),
    "a box of other size": lambda p: p.boxes.size.__setitem__(0, (1, 2)),
    "a negative box": lambda p: p.boxes.start.__setitem__(0, (-1, 0)),
    "too few digests": lambda p: p.boxes.digests.__setitem__(0, ""),
    "bytes shared": lambda p: p.boxes.offset.__setitem__(1, fix.HEAD),
    "no such pack": lambda p: p.boxes.pack.__setitem__(1, 3),
    "another's pack": lambda p: setattr(p, "packs", [fix.pack_row(rank=0)]),
    "a pack twice": lambda p: setattr(p, "packs", p.packs * 2),
    "a rank beyond": lambda p: setattr(p, "world_size", 2),
    "a newer version": lambda p: setattr(p, "version", 2),
    "an unknown feature": lambda p: setattr(p, "read_features", ["x"]),
    "another digest": lambda p: setattr(p, "digest_algorithm", "md5"),
    "no boxes": lambda p: setattr(p, "boxes", BoxTable()),
    "a claim of no tensor": lambda p: p.claims.start.append((0,)),
    "digests of no claim": lambda p: p.claims.digests.append(fix.hexes(b"x")),
    "no mesh": lambda p: setattr(p, "mesh", None),
}


@pytest.mark.parametrize("case", BENT)
def test_the_same_answer_as_for_a_part_alone(case: str) -> None:
    part = copy.deepcopy(share(2))
    BENT[case](part)
    _same(msgspec.json.encode(part))


def test_texts_that_others_wrote() -> None:
    text = msgspec.json.encode(share(2))
    _same(text.replace(b'"step":5', b'"step": 5'))
    _same(text.replace(b'"step":5', b'"step":5,"step":6'))
    _same(text.replace(b'"step":5', b'"step":5,"new":[1]'))
    _same(text.replace(b',"claims":', b',"replica_check":"off","claims":'))
    _same(text.replace(b',"claims":', b',"replica_check":"some","claims":'))
    _same(text.replace(b'"loss"', b'"\\u006coss"'))
    _same(text.replace(b'{"rng":', b'{"rng":1,"rng":'))
    _same(text[:-1])
    _same(b"")


def _same(text: bytes) -> None:
    """A reader that has seen others gives the answer that one gives for this part alone."""
    reader = PartReader()
    for rank in (0, 1):
        reader.read(msgspec.json.encode(share(rank)))
    assert _answer(reader.read, text) == _answer(decode_part, text)
    assert reader.read(msgspec.json.encode(share(3))) == share(3)


def _answer(read: Callable[[bytes], Part], text: bytes) -> Part | tuple[type[FormatError], str]:
    try:
        return read(text)
    except FormatError as error:
        return type(error), str(error)
