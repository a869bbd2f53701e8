"""Manifests: validated as a whole before any use; looked up by every name."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import manifest_fixtures as fix
import msgspec
import pytest
import zstandard

from ckptfmt.errors import FormatError, InvalidInput, NotFound, UnsupportedVersion, Unverifiable
from ckptfmt.format.index import Index
from ckptfmt.format.manifest import Manifest, decode_manifest, manifest_digest
from ckptfmt.format.tables import BoxTable, TensorTable


def test_round_trip() -> None:
    value = fix.manifest()
    data = fix.encoded(value)
    assert decode_manifest(data) == value
    assert fix.encoded(decode_manifest(data)) == data
    assert len(manifest_digest(data)) == 32
    assert value.nbytes == 24 + 8 + 0 + 5


def test_unknown_members_are_ignored() -> None:
    bent = fix.plain(fix.manifest()) | {"new": {"anything": [1, {"a": 1, "b": 2}]}, "write_features": ["later"]}
    bent["tensors"]["colour"] = ["red"] * 4
    bent["packs"][0]["codec"] = "none"
    assert decode_manifest(fix.stored(bent)).write_features == ["later"]


def test_newer_and_unverifiable_manifests_say_so() -> None:
    good = fix.plain(fix.manifest())
    with pytest.raises(UnsupportedVersion, match="version 2"):
        decode_manifest(fix.stored(good | {"version": 2, "tensors": {"shape": "of the future"}}))
    with pytest.raises(UnsupportedVersion, match="zstd-tensors"):
        decode_manifest(fix.stored(good | {"read_features": ["zstd-tensors"]}))
    with pytest.raises(Unverifiable, match="crc32"):
        decode_manifest(fix.stored(good | {"digest_algorithm": "crc32"}))
    with pytest.raises(Unverifiable, match="None"):
        decode_manifest(fix.stored({k: v for k, v in good.items() if k != "digest_algorithm"}))


Bend = Callable[[dict[str, Any]], Any]


def put(*path: Any) -> Bend:
    """Replace the item at ``path[:-1]`` by ``path[-1]``."""

    def bend(value: dict[str, Any]) -> None:
        here: Any = value
        for step in path[:-2]:
            here = here[step]
        here[path[-2]] = path[-1]

    return bend


def drop(*path: Any) -> Bend:
    def bend(value: dict[str, Any]) -> None:
        here: Any = value
        for step in path[:-1]:
            here = here[step]
        del here[path[-1]]

    return bend


RULES: dict[str, tuple[Bend, str]] = {
    "not ours": (put("format", "zip"), "no object of this format"),
    "another object": (put("object", "part"), "object"),
    "no key": (drop("key"), "key"),
    "bad key": (put("key", "../.."), "key"),
    "id 0": (put("id", 0), "id"),
    "bad time": (put("created_at", "yesterday"), "created_at"),
    "chunk 0": (put("chunk_bytes", 0), "chunk_bytes"),
    "column short": (drop("tensors", "dtype", 0), "differ in length"),
    "column missing": (drop("tensors", "shape"), "differ in length"),
    "box column short": (drop("boxes", "size", 0), "differ in length"),
    "offset column short": (drop("boxes", "offset", 0), "differ in length"),
    "name twice": (put("tensors", "name", 1, "w"), "'w' stands twice"),
    "unknown dtype": (put("tensors", "dtype", 0, "float33"), "float33"),
    "unknown kind": (put("tensors", "kind", 0, "mirrored"), "kind"),
    "rank of a common tensor": (put("tensors", "rank", 0, 0), "per_rank"),
    "per_rank without rank": (put("tensors", "rank", 3, -1), "per_rank"),
    "rank beyond": (put("tensors", "rank", 3, 1), "rank"),
    "negative shape": (put("tensors", "shape", 0, [-2, 3]), "shape"),
    "float shape": (put("tensors", "shape", 0, [2.5, 3]), "shape"),
    "absurd shape": (put("tensors", "shape", 0, [2**62, 2**62]), "claim"),
    "absurd empty shape": (put("tensors", "shape", 2, [0, 2**62, 2**62]), "absurd"),
    "many dimensions": (put("tensors", "shape", 0, [1] * 65), "dimensions"),
    "box of no tensor": (put("boxes", "tensor", 4, 9), "existing tensors"),
    "boxes unsorted": (put("boxes", "tensor", 0, 1), "order"),
    "box outside": (put("boxes", "start", 1, [2, 0]), "'w': box"),
    "box overlap": (put("boxes", "start", 1, [0, 0]), "'w'"),
    "box of other rank": (put("boxes", "start", 2, [0]), "'b'"),
    "tensor without box": (lambda v: [v["boxes"][c].pop() for c in v["boxes"]], "'r'"),
    "half a tensor": (lambda v: [v["boxes"][c].pop(1) for c in v["boxes"]], "3 of 6"),
    "missing digest": (put("boxes", "digests", 0, ""), "'w': 0 hex digits"),
    "long digest": (put("boxes", "digests", 4, "0" * 64), "digest"),
    "upper digest": (put("boxes", "digests", 4, "A" * 32), "hex"),
    "digest of the empty": (put("boxes", "digests", 3, "0" * 32), "'e'"),
    "offset in the header": (put("boxes", "offset", 0, 8), "do not lie in the data"),
    "offset beyond": (put("boxes", "offset", 4, fix.HEAD + 98), "do not lie in the data"),
    "empty box beyond": (put("boxes", "offset", 3, fix.HEAD + 101), "do not lie in the data"),
    "negative offset": (put("boxes", "offset", 0, -1), "offset"),
    "huge offset": (put("boxes", "offset", 0, 2**64), "offset"),
    "shared bytes": (put("boxes", "offset", 2, fix.HEAD + 20), "'w' and 'b' share bytes"),
    "no such pack": (put("boxes", "pack", 0, 1), "pack that does not exist"),
    "negative pack": (put("boxes", "pack", 0, -1), "pack that does not exist"),
    "pack elsewhere": (put("packs", 0, "name", "../x.safetensors"), "plain name"),
    "pack absolute": (put("packs", 0, "name", "/etc/passwd"), "plain name"),
    "pack of a bad generation": (put("packs", 0, "generation", "../x"), "generation"),
    "pack twice": (lambda v: v["packs"].append(v["packs"][0]), "stands twice"),
    "header too long": (put("packs", 0, "header_bytes", 10**6), "header"),
    "no ranks": (put("ranks", []), "ranks"),
    "rank 1 only": (put("ranks", 0, "rank", 1), "ranks"),
    "alias of nothing": (put("aliases", "tied", "x"), "alias"),
    "alias of itself": (put("aliases", "w", "w"), "alias"),
    "alias shadows": (put("aliases", "b", "w"), "alias"),
    "reference to nothing": (put("trees", "common", "dict", 0, 1, {"tensor": "x"}), "'x'"),
    "reference with nothing": (put("trees", "common", "dict", 0, 1, {"tensor": []}), "reference"),
    "slot of nobody": (put("trees", "common", "dict", 4, 1, {"per_rank": "x"}), "'x'"),
    "tree of no rank": (put("trees", "per_rank", "7", {}), "rank"),
    "slot within a slot": (put("trees", "per_rank", "0", "s", {"per_rank": "s"}), "per_rank"),
    "slot to nothing": (put("trees", "per_rank", "0", "s", {"tensor": "x"}), "'x'"),
    "two tags": (put("trees", "common", {"dict": [], "tuple": []}), "2 members"),
    "no tag": (put("trees", "common", {}), "0 members"),
    "trees is a list": (put("trees", []), "trees"),
    "tensor in metadata": (put("metadata", {"tensor": "w"}), "metadata"),
    "mesh": (put("ranks", 0, "mesh", {"dp": -1}), "mesh"),
}


@pytest.mark.parametrize("case", RULES)
def test_every_rule(case: str) -> None:
    bend, word = RULES[case]
    value = fix.plain(fix.manifest())
    bend(value)
    with pytest.raises(FormatError, match=word):
        decode_manifest(fix.stored(value))


def test_neighbours_are_compared_past_empty_boxes() -> None:
    value = fix.plain(fix.manifest())
    value["boxes"]["offset"] = [fix.HEAD, fix.HEAD + 12, fix.HEAD + 20, fix.HEAD + 16, fix.HEAD + 60]
    with pytest.raises(FormatError, match="share bytes"):
        decode_manifest(fix.stored(value))


def test_a_writer_cannot_store_what_a_reader_would_refuse() -> None:
    with pytest.raises(FormatError, match="alias"):
        fix.encoded(fix.manifest(aliases={"tied": "x"}))
    table = fix.tensors()
    table.name[1] = "\ud800"
    trees = fix.manifest().trees
    trees.common = None
    with pytest.raises(InvalidInput, match="JSON"):
        fix.encoded(fix.manifest(tensors=table, trees=trees))


@pytest.mark.parametrize("at", ["top", "tensors", "tree", "pack"])
def test_duplicate_members(at: str) -> None:
    text = msgspec.json.encode(fix.manifest())
    old, new = {
        "top": (b'"step":5', b'"step":5,"step":6'),
        "tensors": (b'"tensors":{', b'"tensors":{"name":["x"],'),
        "tree": (b'{"tensor":"w"}', b'{"tensor":"w","tensor":"b"}'),
        "pack": (b'"rank":0,"nbytes"', b'"rank":0,"rank":1,"nbytes"'),
    }[at]
    assert old in text
    with pytest.raises(FormatError, match=r"twice|members"):
        decode_manifest(fix.stored(text.replace(old, new, 1)))


def test_bombs_and_torn_frames() -> None:
    bomb = zstandard.compress(b" " * (64 << 20))
    assert len(bomb) < 20_000
    begin = time.perf_counter()
    with pytest.raises(FormatError, match="claims to unpack"):
        decode_manifest(bomb)
    assert time.perf_counter() - begin < 1
    data = fix.encoded(fix.manifest())
    for bad in (b"", data[:4], data[:-1], data + b"x", data + data, b"\x80\x04\x95pickle", b"{}"):
        with pytest.raises(FormatError):
            decode_manifest(bad)
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(b"{}")
    with pytest.raises(FormatError, match="claims to unpack"):
        decode_manifest(unsized)


@pytest.mark.parametrize(
    "text", [b"", b"null", b"[]", b"{}", b"{", b'"x"', b"\xff", b"[" * 10**6, b'{"trees":' * 10**5]
)
def test_what_is_no_manifest(text: bytes) -> None:
    with pytest.raises(FormatError):
        decode_manifest(fix.stored(text))


# -- lookup -----------------------------------------------------------------------------------------
def test_index() -> None:
    index = Index(fix.manifest())
    assert list(index) == ["w", "b", "e", "r"]
    assert len(index) == 4
    assert "tied" in index
    assert "x" not in index
    w = fix.found(index, "tied")
    assert (w.name, w.dtype, w.shape, w.kind, w.nbytes) == ("w", "float32", (2, 3), "sharded", 24)
    assert [(b.start, b.size, b.offset, b.nbytes) for b in w.boxes] == [
        ((0, 0), (1, 3), fix.HEAD, 12),
        ((1, 0), (1, 3), fix.HEAD + 12, 12),
    ]
    assert b"".join(w.boxes[0].digests).hex() == fix.hexes(b"a" * 12)
    assert w.boxes[0].pack == fix.pack_row()
    assert fix.found(index, "e").boxes[0].digests == ()
    assert index.canonical("tied") == "w"


def test_index_columns() -> None:
    index = Index(fix.manifest())
    assert [index.row(name) for name in ("w", "b", "e", "r", "tied")] == [0, 1, 2, 3, 0]
    assert index.row("w", 5) == 0
    assert index.row("r", 0) == 3
    for name, rank in (("x", None), ("r", 1)):
        with pytest.raises(NotFound, match=name):
            index.row(name, rank)
    assert list(index.first_box) == [0, 2, 3, 4, 5]
    assert index.box_bytes == [12, 12, 8, 0, 5]
    for row in range(4):
        mine = range(index.first_box[row], index.first_box[row + 1])
        assert [index.digests(j) for j in mine] == [box.digests for box in index.entry(row).boxes]
        assert [index.box_bytes[j] for j in mine] == [box.nbytes for box in index.entry(row).boxes]
    assert list(Index(large(3)).first_box) == [0, 1, 2, 3]
    assert Index(large(3)).row("model.layers.0.block2.weight") == 2


def test_index_per_rank() -> None:
    rows, boxes = fix.tensors(), fix.boxes()
    rows.name.append("r")
    rows.kind.append("per_rank")
    rows.rank.append(1)
    rows.dtype.append("uint8")
    rows.shape.append((2,))
    for column, item in zip(
        ("tensor", "start", "size", "pack", "offset"), (4, (0,), (2,), 0, fix.HEAD + 40), strict=True
    ):
        getattr(boxes, column).append(item)
    boxes.digests.append(fix.hexes(b"ee"))
    ranks = [msgspec.structs.replace(fix.manifest().ranks[0], rank=rank) for rank in (0, 1)]
    index = Index(decode_manifest(fix.encoded(fix.manifest(tensors=rows, boxes=boxes, ranks=ranks))))
    assert fix.found(index, "r", 1).shape == (2,)
    assert fix.found(index, "r", 0).shape == (5,)
    assert (index.row("r", 0), index.row("r", 1), index.row("w", 1), index.row("w")) == (3, 4, 0, 0)
    assert fix.found(index, "w", 1).name == "w"
    assert [entry.rank for entry in index.entries("r")] == [0, 1]
    assert list(index) == ["w", "b", "e", "r"]
    for rank in (None, 2):
        with pytest.raises(NotFound, match="ranks"):
            fix.found(index, "r", rank)


def test_near_names() -> None:
    with pytest.raises(NotFound, match="'tied'"):
        fix.found(Index(fix.manifest()), "tie")


def large(count: int) -> Manifest:
    names = [f"model.layers.{i // 10}.block{i % 10}.weight" for i in range(count)]
    return fix.manifest(
        chunk_bytes=8 << 20,
        packs=[fix.pack_row(nbytes=fix.HEAD + 4096 * count)],
        tensors=TensorTable(
            name=names,
            kind=["replicated"] * count,
            rank=[-1] * count,
            dtype=["bfloat16"] * count,
            shape=[(64, 32)] * count,
        ),
        boxes=BoxTable(
            tensor=list(range(count)),
            start=[(0, 0)] * count,
            size=[(64, 32)] * count,
            pack=[0] * count,
            offset=[fix.HEAD + 4096 * i for i in range(count)],
            digests=[f"{i:032x}" for i in range(count)],
        ),
        aliases={},
        trees=msgspec.convert(
            {"common": {"dict": [[name, {"tensor": name}] for name in names]}}, type(fix.manifest().trees)
        ),
    )


@pytest.mark.slow
def test_twenty_thousand_tensors_cost_little_more_than_their_json() -> None:
    data = fix.encoded(large(20_000))
    text = zstandard.decompress(data)

    def best(call: Callable[[], Any]) -> float:
        times = []
        for _ in range(5):
            begin = time.process_time()
            call()
            times.append(time.process_time() - begin)
        return min(times)

    # A ratio, because absolute times tell about the machine. Typically 3.
    assert best(lambda: decode_manifest(data)) < 12 * best(lambda: msgspec.json.decode(text))
