"""Generations as several ranks save them, below the front: opened by hand, without a catalog or a verdict."""

from __future__ import annotations

import contextlib
import itertools
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from forked import at_once

from ckptfmt import connect
from ckptfmt.backends.memory import MemoryBackend
from ckptfmt.backends.posix import PosixBackend
from ckptfmt.engine.arena import Arena
from ckptfmt.engine.load.load import load_state
from ckptfmt.engine.load.restore import RestoreOptions, restore_state
from ckptfmt.engine.opened import Opened
from ckptfmt.engine.reports import GenerationInfo, RestoreReport
from ckptfmt.engine.save.context import Ranks
from ckptfmt.engine.save.parts import make_part
from ckptfmt.engine.save.persist import write_packs
from ckptfmt.engine.save.snapshot import Planner, Snapshot, take_snapshot
from ckptfmt.engine.site import Site
from ckptfmt.format import checksum, tree
from ckptfmt.format.boxes import Box
from ckptfmt.format.manifest import Manifest, RankRow, Writer, decode_manifest, encode_sound, validate
from ckptfmt.format.merge import merge_parts
from ckptfmt.format.part import PART_BYTES_MAX, Part, decode_part, encode_part
from ckptfmt.format.tables import BoxTable, PackRow, TensorTable
from ckptfmt.format.trees import Trees
from ckptfmt.generation import Generation
from ckptfmt.ports.backend import Backend

REPOSITORY: Final = "11111111-2222-4333-8444-555555555555"
KEY: Final = "a" * 32
FOLDER: Final = "g"
CREATED: Final = "2026-01-01T00:00:00.000000Z"
MANIFEST: Final = "manifest.json.zst"


# -- opened by hand ---------------------------------------------------------------------------------
def opened_of(backend: Backend, stored: bytes) -> Opened:
    """The generation of a manifest, which is read as any other."""
    manifest = decode_manifest(stored)
    info = GenerationInfo(
        id=1,
        key=KEY,
        run="r",
        step=7,
        state="committed",
        nbytes=manifest.nbytes,
        tags=(),
        parent_key=None,
        commit_seq=1,
        world_size=len(manifest.ranks),
        created_at=None,
        durable_at=None,
        committed_at=None,
        proven_at=None,
        stall_seconds=None,
    )
    return Opened(Site(REPOSITORY, backend, None, read_only=True), FOLDER, info, manifest)


def front(opened: Opened) -> Generation:
    return Generation(
        opened,
        families_for=connect.families_for,
        live_families=connect.live_families,
        guard=lambda opened: contextlib.nullcontext(),
    )


def restore(
    opened: Opened, into: Any, *, rank: int = 0, world_size: int = 1, map: Any = None, **options: Any
) -> RestoreReport:
    """``restore`` as one of several ranks."""
    told = RestoreOptions(rank=rank, world_size=world_size, map=map, **options)
    return restore_state(opened, into, connect.live_families(), told)


def load(opened: Opened, **options: Any) -> Any:
    return load_state(opened, connect.families_for, **options)


# -- saved by ranks of this process, or of others ----------------------------------------------------
def write_rank(backend: Backend, state: Any, rank: int, world_size: int, members: Sequence[int] | None = None) -> Part:
    """What one rank does in a save: freeze, write its packs, list them."""
    backend.make_folder(FOLDER)
    ranks = Ranks(rank, world_size, tuple(range(world_size) if members is None else members))
    snapshot = take_snapshot(
        state, None, families=connect.live_families(), planner=Planner(), arena=Arena(), ranks=ranks
    )
    snapshot.freeze()
    return write_snapshot(backend, snapshot, ranks)


def write_snapshot(backend: Backend, snapshot: Snapshot, ranks: Ranks) -> Part:
    """Write a frozen snapshot, or one that is still being copied, and list it."""
    written = write_packs(backend, FOLDER, ranks.rank, snapshot, give_up=lambda: None, passing=lambda error: None)
    return make_part(
        snapshot,
        written,
        key=KEY,
        step=7,
        launch_digest="b" * 32,
        save_number=0,
        ranks=ranks,
        created_at=CREATED,
    )


def merged(parts: Sequence[Part]) -> bytes:
    """The stored manifest of all parts, which are read as any other."""
    read = [decode_part(encode_part(part)) for part in parts]
    members = [part.rank for part in read]
    sound = merge_parts(
        read, id=1, repository=REPOSITORY, run="r", parent=None, members=members, world_size=read[0].world_size
    )
    return encode_sound(sound)


def save(states: Sequence[Any] | Mapping[int, Any], world_size: int | None = None) -> Opened:
    """Save one state for each rank, or by rank for those that save, in this process and in memory."""
    backend = MemoryBackend(f"reshard-{uuid.uuid4().hex}")
    by_rank = states if isinstance(states, Mapping) else dict(enumerate(states))
    size = world_size or len(by_rank)
    parts = [write_rank(backend, state, rank, size, list(by_rank)) for rank, state in by_rank.items()]
    return opened_of(backend, merged(parts))


def as_ranks(tmp_path: Path, world_size: int, work: Callable[[int, int], Any]) -> list[Any]:
    """``work(rank, world_size)`` in a process for each rank, joined by gloo; what they returned."""
    store = tmp_path / f"store-{uuid.uuid4().hex}"
    return at_once(partial(_as_rank, work, world_size, str(store)), world_size)


def _as_rank(work: Callable[[int, int], Any], world_size: int, store: str, rank: int) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
        found = work(rank, world_size)
        dist.barrier()
        dist.destroy_process_group()
    return found


def save_together(folder: Path, state: Any, rank: int, world_size: int) -> None:
    """Save into ``folder`` as one rank of a process group; on return all have, and the manifest is there."""
    backend = on_disk(folder)
    unite(backend, write_rank(backend, state, rank, world_size), world_size)


def unite(backend: Backend, part: Part, world_size: int) -> None:
    """Put this rank's part there; on return all have, and the manifest is there."""
    import torch.distributed as dist

    backend.create(f"{FOLDER}/part-{part.rank}", encode_part(part))
    dist.barrier()
    if part.rank == 0:
        parts = [decode_part(backend.read(f"{FOLDER}/part-{rank}", limit=PART_BYTES_MAX)) for rank in range(world_size)]
        backend.create(f"{FOLDER}/{MANIFEST}", merged(parts))
    dist.barrier()


def save_alone(folder: Path, state: Any) -> None:
    """The same as the only rank of a job."""
    backend = on_disk(folder)
    backend.create(f"{FOLDER}/{MANIFEST}", merged([write_rank(backend, state, 0, 1)]))


def on_disk(folder: Path) -> PosixBackend:
    folder.mkdir(exist_ok=True)
    return PosixBackend(str(folder))


def open_folder(folder: Path) -> Opened:
    return opened_of(PosixBackend(str(folder)), (folder / FOLDER / MANIFEST).read_bytes())


# -- laid out by hand ---------------------------------------------------------------------------------
def grid(shape: Sequence[int], cuts: Sequence[Sequence[int]]) -> list[Box]:
    """The boxes between ``cuts`` along each dimension. An empty tensor is one box."""
    if 0 in shape:
        return [((0,) * len(shape), tuple(shape))]
    edges = [sorted({0, *cut, extent}) for cut, extent in zip(cuts, shape, strict=True)]
    corners = itertools.product(*([(a, b - a) for a, b in itertools.pairwise(edge)] for edge in edges))
    return [(tuple(a for a, _ in corner), tuple(n for _, n in corner)) for corner in corners]


def part_of(array: np.ndarray[Any, Any], box: Box) -> np.ndarray[Any, Any]:
    return array[tuple(slice(a, a + n) for a, n in zip(*box, strict=True))]


def lay_out(
    tensors: Mapping[str, tuple[np.ndarray[Any, Any], Sequence[Box]]],
    *,
    chunk_bytes: int,
    packs: int = 2,
    aliases: Mapping[str, str] = MappingProxyType({}),
) -> Opened:
    """Tensors in these boxes, dealt out to packs, with chunks as small as wanted."""
    backend = MemoryBackend(f"reshard-{uuid.uuid4().hex}")
    backend.make_folder(FOLDER)
    bodies = [bytearray(16) for _ in range(packs)]
    table, boxes = TensorTable(), BoxTable()
    for row, (name, (array, pieces)) in enumerate(tensors.items()):
        whole = len(pieces) == 1
        table.name.append(name)
        table.kind.append("replicated" if whole else "sharded")
        table.rank.append(-1)
        table.dtype.append(str(array.dtype))
        table.shape.append(array.shape)
        for number, box in enumerate(pieces):
            data, body = part_of(array, box).tobytes(), bodies[(row + number) % packs]
            body += bytes(-len(body) % 16)
            spans = checksum.chunk_spans(len(data), chunk_bytes)
            boxes.tensor.append(row)
            boxes.start.append(box[0])
            boxes.size.append(box[1])
            boxes.pack.append((row + number) % packs)
            boxes.offset.append(len(body))
            boxes.digests.append("".join(checksum.hex_digest(data[at : at + n]) for at, n in spans))
            body += data
    rows = []
    for number, body in enumerate(bodies):
        name = f"r00000-p{number:03d}.safetensors"
        backend.create(f"{FOLDER}/{name}", bytes(body))
        rows.append(PackRow(name=name, rank=0, nbytes=len(body), header_bytes=16, header_digest="0" * 32))
    manifest = Manifest(
        key=KEY,
        step=7,
        launch="b" * 32,
        save_number=0,
        created_at=CREATED,
        writer=Writer(library="test", version="1"),
        chunk_bytes=chunk_bytes,
        packs=rows,
        tensors=table,
        boxes=boxes,
        repository=REPOSITORY,
        run="r",
        id=1,
        ranks=[RankRow(rank=0)],
        aliases=dict(aliases),
        trees=Trees(common={"dict": [[name, tree.reference("array", name)] for name in (*tensors, *aliases)]}),
        metadata={"dict": []},
    )
    return opened_of(backend, encode_sound(validate(manifest)))


class Reads:
    """What is read from an opened generation from now on: (object, offset, bytes)."""

    def __init__(self, opened: Opened, patch: Any) -> None:
        self.ranges: list[tuple[str, int, int]] = []
        plain = opened.site.backend.read_into

        def read_into(key: str, offset: int, buffer: Any) -> None:
            self.ranges.append((key, offset, memoryview(buffer).nbytes))
            plain(key, offset, buffer)

        patch.setattr(opened.site.backend, "read_into", read_into)
