"""One committed generation with its packs on several tiers, each of which can be damaged by itself."""

from __future__ import annotations

import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

import ckptfmt
from ckptfmt import connect, reading
from ckptfmt.backends.posix import PosixBackend, PosixOptions
from ckptfmt.connect import Connection
from ckptfmt.engine.tiers import Tier, Tiers
from ckptfmt.format import layout, verdict
from ckptfmt.generation import Generation
from ckptfmt.ports.backend import Backend, CachedRange, ObjectInfo, Traits

CHUNK: Final = 8 << 20
BUFFERED: Final = PosixOptions(direct=False)


def state(seed: int = 0) -> dict[str, Any]:
    """One tensor of three chunks, the last of them short, and some small ones."""
    rng = np.random.default_rng(seed)
    return {
        "big": rng.integers(0, 255, 2 * CHUNK + 4096 * 3, np.uint8),
        "small": rng.random(64),
        "odd": rng.integers(1, 9, 7, np.int8),
    }


def blank() -> dict[str, Any]:
    return {name: np.zeros_like(value) for name, value in state().items()}


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name], err_msg=name, strict=True)


class Watched:
    """A backend whose reads are counted, and answered wrongly as often as ``flips`` says.

    ``distant``: it says that every request waits for a round trip.
    """

    def __init__(self, inner: Backend, *, flips: int = 0, distant: bool = False, local: bool | None = None) -> None:
        self._inner = inner
        self._distant = distant
        self._local = inner.traits.local if local is None else local
        self.flips = flips
        self.asked: Counter[str] = Counter()
        self.ranges: list[tuple[str, int, int]] = []

    @property
    def traits(self) -> Traits:
        return replace(self._inner.traits, distant=self._distant, local=self._local)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        self.asked["read_into"] += 1
        self.ranges.append((key.rpartition("/")[2], offset, len(buffer)))
        self._inner.read_into(key, offset, buffer)
        if self.flips:
            self.flips -= 1
            buffer[len(buffer) // 2] ^= 1

    def map_cached(self, key: str, offset: int, memory: memoryview) -> CachedRange | None:
        return None

    def read(self, key: str, *, limit: int) -> bytes:
        self.asked["read"] += 1
        return self._inner.read(key, limit=limit)

    def head(self, key: str) -> ObjectInfo:
        self.asked["head"] += 1
        return self._inner.head(key)

    def list(self, prefix: str) -> list[ObjectInfo]:
        self.asked["list"] += 1
        return self._inner.list(prefix)

    def list_folders(self, prefix: str) -> list[str]:
        self.asked["list_folders"] += 1
        return self._inner.list_folders(prefix)


@dataclass
class Places:
    """The roots of a repository's tiers, and how they are opened."""

    durable: Path
    saved: dict[str, Any]
    folder: str
    stage: Path | None = None
    replicas: list[Path] = field(default_factory=list)
    wrapped: dict[Path, Callable[[Backend], Any]] = field(default_factory=dict)
    connections: list[Connection] = field(default_factory=list)

    def backend(self, root: Path) -> Any:
        plain = PosixBackend(root, BUFFERED)
        return self.wrapped[root](plain) if root in self.wrapped else plain

    def generation(self, *, mode: connect.Mode = "r", catalog: str | None = None) -> Generation:
        """The latest one, read through all tiers."""
        connection = connect.open_site(self.durable, mode=mode, catalog=catalog, storage_options=None)
        self.connections.append(connection)
        stage = None
        if self.stage is not None:
            stage = Tier(str(uuid.uuid4()), "stage", self.backend(self.stage), "here")
        replicas = tuple(Tier(str(uuid.uuid4()), "replica", self.backend(root)) for root in self.replicas)
        site = replace(connection.site, backend=self.backend(self.durable), tiers=Tiers(stage, replicas))
        return reading.find(Connection(connection.url, site), None, None)

    def close(self) -> None:
        for connection in self.connections:
            connection.close()

    @property
    def saved_as(self) -> str:
        return "r00000-p000.safetensors"

    def pack(self, root: Path) -> Path:
        return root / self.folder / self.saved_as

    def offset_of(self, name: str, chunk: int = 0) -> int:
        """Where a chunk of a tensor begins in its pack."""
        with ckptfmt.open(self.durable, mode="r", catalog="none") as repo:
            return int(repo.latest()._opened.stored.find(name, None).boxes[0].offset + chunk * CHUNK)

    def damage(self, root: Path, name: str, chunk: int = 0) -> None:
        """Flip a bit of one chunk of a tensor."""
        with self.pack(root).open("r+b") as file:
            file.seek(self.offset_of(name, chunk) + 5)
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 0x10]))


def repair(here: Places, root: Path, source: Path) -> Path:
    """As a repair leaves it: bytes of ``source`` under a new name, which it returns, and an object that says so."""
    new = root / here.folder / layout.repaired_pack_name(here.saved_as, 1)
    new.write_bytes(here.pack(source).read_bytes())
    with ckptfmt.open(here.durable, mode="r", catalog="none") as repo:
        repository = repo.latest()._opened.site.repository
    record = verdict.Repair(repository=repository, key=here.folder.rpartition("/")[2], packs={here.saved_as: new.name})
    (new.parent / layout.repair_name("0" * 32)).write_bytes(verdict.encode_repair(record))
    return new


def places(root: Path, *, stage: bool = True, replicas: int = 1) -> Places:
    """Save a generation and copy it: its packs to a stage, all of it to replicas."""
    durable, saved = root / "durable", state()
    generation = ckptfmt.save(saved, durable, run="r", step=7)
    found = Places(durable, saved, generation._opened.folder)
    if stage:
        found.stage = root / "stage"
        (found.stage / found.folder).mkdir(parents=True)
        shutil.copy(found.pack(durable), found.stage / found.folder)
    for number in range(replicas):
        replica = root / f"replica{number}"
        shutil.copytree(durable, replica, ignore=shutil.ignore_patterns("catalog.sqlite*"))
        found.replicas.append(replica)
    return found


@contextmanager
def laying(root: Path) -> Iterator[Callable[..., Places]]:
    """``lay(**kinds)``: ``places(root, **kinds)``, closed in the end."""
    with ExitStack() as made:

        def lay(**kinds: Any) -> Places:
            here = places(root, **kinds)
            made.callback(here.close)
            return here

        yield lay
