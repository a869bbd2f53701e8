"""Write the golden repositories of format version 1: small, whole, and always the same bytes.

``python tests/golden/generate.py`` writes them beside this file. They were made once and stay: a
change of these bytes is a change of the format.
"""

from __future__ import annotations

import datetime as dt
import math
import pathlib
import struct
import sys
import uuid
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np

from ckptfmt.format import checksum, dtypes, layout, merge, pack, tree, verdict
from ckptfmt.format.manifest import Writer, encode_sound, manifest_digest
from ckptfmt.format.part import Part, encode_part
from ckptfmt.format.tables import BoxTable, ClaimTable, PackRow, TensorTable

REPOSITORY = "0d9f7a52-3c1e-4c57-9d1a-5f6b8f0e2a11"
CATALOG = "7c1b0c9e-55a4-4b61-8a6f-2f0f9f6c1d22"
CREATED = "2025-01-02T03:04:05.000006Z"
TOKEN = "00112233445566778899aabbccddeeff"
CHUNK_BYTES = 64
RUN = "golden run"
PLAIN = (
    "float64",
    "float32",
    "float16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint64",
    "uint32",
    "uint16",
    "uint8",
    "bool",
    "complex64",
    "complex128",
)
"""Element types that numpy has by itself."""


class Store:
    """Collects one rank's tensors as the leaf callback of the tree codec, then packs them."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.rows: list[tuple[str, str, str, tuple[int, ...], tuple[int, ...], bytes]] = []
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.aliases: dict[str, str] = {}
        self.claims: list[int] = []
        self._seen: dict[int, str] = {}

    def add(
        self,
        name: str,
        dtype: str,
        box: np.ndarray[Any, Any],
        *,
        kind: str = "replicated",
        start: tuple[int, ...] | None = None,
        shape: tuple[int, ...] | None = None,
        claim: bool = False,
    ) -> None:
        if claim:
            self.claims.append(len(self.rows))
        size = box.shape
        self.rows.append((name, kind, dtype, start or (0,) * len(size), size, box.tobytes()))
        self.shapes[name] = shape if shape is not None else size

    def leaf(self, path: str, value: Any) -> tree.Node | None:
        if isinstance(value, np.ndarray):
            first = self._seen.setdefault(id(value), path)
            if first != path:
                self.aliases[path] = first
                return tree.reference("array", path)
            name = dtypes.from_numpy(value.dtype)
            assert name is not None
            self.add(path, name, value.astype(dtypes.numpy_dtype(name)))
            return tree.reference("array", path)
        if isinstance(value, bytes | bytearray):
            self.add(path, "uint8", np.frombuffer(value, np.uint8))
            return tree.reference(f"stored_{type(value).__name__}", path)
        return None

    def part(self, key: str, step: int, n: int, node: tree.Node, files: dict[str, bytes], **more: Any) -> Part:
        entries = [
            pack.PackEntry(name, dtype, size, start, self.shapes[name], len(raw))
            for name, _, dtype, start, size, raw in self.rows
        ]
        written = [i for i in range(len(self.rows)) if i not in self.claims]
        order = [written[i] for i in pack.order([entries[i] for i in written])]
        packs, place = [], {}
        for index, members in enumerate(pack.split([entries[i] for i in order], limit=4096)):
            chosen = [order[i] for i in members]
            plan = pack.layout_pack([entries[i] for i in chosen])
            name = layout.pack_name(self.rank, index)
            files[name] = plan.header + b"".join(self.rows[i][5] for i in chosen)
            packs.append(
                PackRow(
                    name=name,
                    rank=self.rank,
                    nbytes=plan.nbytes,
                    header_bytes=len(plan.header),
                    header_digest=plan.header_digest,
                )
            )
            place |= {i: (index, offset) for i, offset in zip(chosen, plan.offsets, strict=True)}
        return self._part(key, step, n, node, packs, place, more)

    def _part(
        self,
        key: str,
        step: int,
        n: int,
        node: tree.Node,
        packs: list[PackRow],
        place: dict[int, tuple[int, int]],
        more: dict[str, Any],
    ) -> Part:
        tensors, boxes, claims = TensorTable(), BoxTable(), ClaimTable()
        for i, (name, kind, dtype, start, size, raw) in enumerate(self.rows):
            if not tensors.name or tensors.name[-1] != name:
                tensors.name.append(name)
                tensors.kind.append(kind)  # type: ignore[arg-type]
                tensors.rank.append(self.rank if kind == "per_rank" else -1)
                tensors.dtype.append(dtype)
                tensors.shape.append(self.shapes[name])
            spans = checksum.chunk_spans(len(raw), CHUNK_BYTES)
            table: BoxTable | ClaimTable = claims if i in self.claims else boxes
            table.tensor.append(len(tensors.name) - 1)
            table.start.append(start)
            table.size.append(size)
            table.digests.append("".join(checksum.hex_digest(raw[a : a + n]) for a, n in spans))
            if i in place:
                boxes.pack.append(place[i][0])
                boxes.offset.append(place[i][1])
        return Part(
            key=key,
            step=step,
            launch=layout.launch_digest(TOKEN),
            save_number=n,
            created_at=CREATED,
            writer=Writer(library="ckptfmt", version="golden"),
            chunk_bytes=CHUNK_BYTES,
            packs=packs,
            tensors=tensors,
            boxes=boxes,
            claims=claims,
            aliases=self.aliases,
            rank=self.rank,
            tree=node,
            **more,
        )


def scalars() -> dict[Any, Any]:
    """One value of every kind that the state tree knows without help from a library."""
    odict = OrderedDict(b=1, a=[2.5, -0.0])
    with_metadata = OrderedDict(w=1)
    with_metadata._metadata = OrderedDict({"": {"version": 2}})  # type: ignore[attr-defined]
    (odd_nan,) = struct.unpack("<d", struct.pack("<Q", 0x7FF8DEADBEEF0001))
    zone = dt.timezone(dt.timedelta(hours=-3, minutes=-30), "NST")
    return {
        "none": None,
        "true": True,
        "int": -7,
        "big": 2**80,
        "small": -(2**53),
        "float": 0.1,
        "huge": 1e300,
        "zero": -0.0,
        "inf": math.inf,
        "-inf": -math.inf,
        "nan": math.nan,
        "odd nan": odd_nan,
        "complex": complex(1.5, -math.inf),
        "str": "grün 雪",
        "surrogate": "a\ud800",
        "bytes": b"\x00\xff",
        "bytearray": bytearray(b"xyz"),
        "list": [1, [], [None]],
        "tuple": ((), (1, "a")),
        0: "int key",
        "0": "str key",
        (1, 2): "tuple key",
        None: "None key",
        "a/b": 1,
        "..": 2,
        "": 3,
        "a.b": 1,
        "a": {"b": 2},
        "odict": odict,
        "state_dict": with_metadata,
        "counter": Counter("abca"),
        "defaultdict": defaultdict(list, k=[1]),
        "plain default": defaultdict(None, k=1),
        "deque": deque([1, 2], 5),
        "set": {3, 1, "x"},
        "frozenset": frozenset({(1,), 2}),
        "range": range(2, 2**60, 3),
        "slice": slice(None, 5, -1),
        "path": pathlib.PurePosixPath("/a/b"),
        "windows": pathlib.PureWindowsPath("c:\\x"),
        "datetime": dt.datetime(2024, 5, 6, 7, 8, 9, 10, tzinfo=zone),
        "naive": dt.datetime(2024, 1, 1, fold=1),
        "berlin": dt.datetime(2024, 7, 1, 12, tzinfo=zoneinfo.ZoneInfo("UTC")),
        "date": dt.date(2024, 2, 29),
        "time": dt.time(1, 2, 3, tzinfo=dt.UTC),
        "timedelta": dt.timedelta(-1, 5, 7),
        "timezone": zone,
        "uuid": uuid.UUID(int=2**100),
        "decimal": Decimal("1.50"),
        "fraction": Fraction(-3, 2**70),
        "numpy scalars": [np.float32(1.5), np.int64(-1), np.bool_(True), np.complex128(1 - 2j)],
        "numpy dtype": np.dtype(">i4"),
    }


def arrays() -> dict[str, Any]:
    """Shapes and types: empty, 0-d, strided, several chunks, tied, big-endian, many element types."""
    count = np.arange(90, dtype=np.float32).reshape(9, 10)
    tied = np.arange(6, dtype=np.int64)
    return {
        "matrix": count,
        "strided": count.T[::2],
        "scalar": np.array(3.25),
        "empty": np.zeros((3, 0, 2), np.float32),
        "tied": {"emb": tied, "head": tied},
        "big endian": np.arange(4, dtype=">u2"),
        "bytes": bytes(range(256)) * 5,
        "bytearray": bytearray(2000),
        "types": {name: np.arange(3).astype(name) for name in PLAIN},
    }


def torch_nodes() -> dict[str, tree.Node]:
    """Nodes that only a torch process rebuilds, and a type that nobody registered."""
    return {
        "size": {"torch.Size": [2, 3]},
        "dtype": {"torch.dtype": "bfloat16"},
        "device": {"torch.device": "cuda:1"},
        "format": {"torch.memory_format": "channels_last"},
        "layout": {"torch.layout": "strided"},
        "registered": {"registered": ["my.Point", {"tuple": [1, 2]}]},
        "stateful": tree.stateful("module", "torch.nn.Linear", {"dict": [["stripped", []]]}, {"dict": [["n", 1]]}),
    }


def raw_types(store: Store) -> tree.Node:
    """Element types that plain numpy lacks: their bytes, as the type's name."""
    pairs = []
    for name, row in dtypes.DTYPES.items():
        if name in PLAIN:
            continue
        raw = np.arange(3 * row.itemsize, dtype=np.uint8)
        path = f"raw.{name}"
        store.rows.append((path, "replicated", name, (0,), (3,), raw.tobytes()))
        store.shapes[path] = (3,)
        pairs.append([name, tree.reference("tensor", path, ("parameter",))])
    return {"dict": pairs}


def write(root: pathlib.Path, key: str, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        target = root / key / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


def save(
    root: pathlib.Path, parts: list[Part], files: dict[str, bytes], *, id: int, seq: int, parent: str | None
) -> None:
    run_key = layout.run_key(RUN)
    sound = merge.merge_parts(parts, id=id, repository=REPOSITORY, run=RUN, parent=parent)
    manifest, stored = sound.manifest, encode_sound(sound)
    name = layout.manifest_name(manifest_digest(stored))
    files |= {layout.part_name(part.rank): encode_part(part) for part in parts} | {name: stored}
    ref = verdict.ManifestRef(name=name, digest=manifest_digest(stored), bytes=len(stored))
    files[layout.COMMIT] = verdict.encode_commit(
        verdict.Commit(
            verdict="committed",
            repository=REPOSITORY,
            epoch=1,
            run=RUN,
            id=id,
            key=manifest.key,
            step=manifest.step,
            commit_seq=seq,
            parent=parent,
            fence=1,
            manifest=ref,
            committed_at=CREATED,
        )
    )
    write(root, layout.generation_folder(run_key, manifest.key), files)
    write(root, "", {layout.commit_hint(run_key, 1, seq, manifest.key): b""})


def start(root: pathlib.Path) -> None:
    marker = verdict.Marker(repository=REPOSITORY, created_at=CREATED)
    claim = verdict.CatalogClaim(repository=REPOSITORY, catalog=CATALOG, epoch=1, location="embedded")
    write(
        root, "", {layout.MARKER: verdict.encode_marker(marker), layout.catalog_claim(1): verdict.encode_claim(claim)}
    )


def key_of(n: int) -> str:
    return layout.generation_key(TOKEN, layout.run_key(RUN), n)


def one_rank(root: pathlib.Path) -> None:
    """Generation 0 retired, 1 aborted, 2 committed, 3 committed (a rollback: its step is lower)."""
    start(root)
    folder = layout.generation_folder(layout.run_key(RUN), "")
    simple: dict[str, bytes] = {}
    first = Store()
    node = tree.encode({"w": np.arange(4.0)}, first.leaf)
    save(root, [first.part(key_of(0), 100, 0, node, simple, world_size=1)], simple, id=1, seq=1, parent=None)
    for name in simple:
        if name != layout.COMMIT:
            (root / folder / key_of(0) / name).unlink()
    stone = verdict.Retired(repository=REPOSITORY, run=RUN, id=1, key=key_of(0), retired_at=CREATED)
    aborted = verdict.Commit(
        verdict="aborted",
        repository=REPOSITORY,
        epoch=1,
        run=RUN,
        id=2,
        key=key_of(1),
        step=200,
        fence=1,
        reason="rank 0 failed while writing",
    )
    write(root, folder + key_of(0), {layout.RETIRED: verdict.encode_retired(stone)})
    write(root, folder + key_of(1), {layout.COMMIT: verdict.encode_commit(aborted)})
    second: dict[str, bytes] = {}
    again = Store()
    node = tree.encode({"w": np.arange(4.0) + 1}, again.leaf)
    save(root, [again.part(key_of(2), 300, 2, node, second, world_size=1)], second, id=3, seq=2, parent=key_of(0))
    whole: dict[str, bytes] = {}
    store = Store()
    pairs = tree.encode({"scalars": scalars(), "arrays": arrays()}, store.leaf)["dict"]
    pairs += [["torch", {"dict": [[name, item] for name, item in torch_nodes().items()]}], ["raw", raw_types(store)]]
    metadata = tree.encode({"note": "golden", "loss": 0.25}, store.leaf)
    part = store.part(key_of(3), 250, 3, {"dict": pairs}, whole, world_size=1, metadata=metadata)
    save(root, [part], whole, id=4, seq=3, parent=key_of(2))


def two_ranks(root: pathlib.Path) -> None:
    """A tensor sharded over two ranks, one replicated (written by rank 0), one kept by each rank."""
    start(root)
    matrix = np.arange(5 * 6, dtype=np.float32).reshape(5, 6)
    bias = np.arange(3, dtype=np.float64)
    parts, files = [], {}
    for rank, rows in enumerate((slice(0, 3), slice(3, 5))):
        store = Store(rank)
        store.add("w", "float32", matrix[rows], kind="sharded", start=(rows.start, 0), shape=(5, 6))
        store.add("b", "float64", bias, claim=rank == 1)
        store.add("rng", "uint8", np.full(4, rank, np.uint8), kind="per_rank")
        pairs = [
            ["w", tree.reference("tensor", "w")],
            ["b", tree.reference("tensor", "b")],
            ["rng", tree.per_rank("rng")],
        ]
        pairs += [[f"only on {rank}", rank]]
        slots = {"rng": {"tuple": [rank, tree.reference("tensor", "rng")]}}
        more = {"world_size": 2, "per_rank": slots, "mesh": {"dp": rank}}
        parts.append(store.part(key_of(0), 10, 0, {"dict": pairs}, files, **more))
    save(root, parts, files, id=1, seq=1, parent=None)


REPOSITORIES = {"v1-one-rank": one_rank, "v1-two-ranks": two_ranks}

if __name__ == "__main__":
    for folder, make in REPOSITORIES.items():
        target = pathlib.Path(__file__).parent / folder
        if target.exists():
            sys.exit(f"{target} exists: golden repositories are made once")
        make(target)
