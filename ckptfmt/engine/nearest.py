"""Where the bytes of packs come from: each range from the nearest tier that has it (spec/tiers.md, "Reading").

Nothing that differs from its digest is used: such a chunk is read once more, and then from the next copy, by itself.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ckptfmt.engine import protocol
from ckptfmt.engine.read import check_chunk
from ckptfmt.engine.read_plan import GAP_BYTES, Chunk
from ckptfmt.engine.readlog import ReadLog
from ckptfmt.engine.repairs import Repairs
from ckptfmt.engine.rereading import RETRIES
from ckptfmt.engine.roots import root_path
from ckptfmt.engine.site import Site
from ckptfmt.engine.tiers import Tier
from ckptfmt.engine.transfer import IO_THREADS
from ckptfmt.errors import BackendError, CkptError, Corrupt, NotFound
from ckptfmt.format import checksum
from ckptfmt.format.manifest import Manifest
from ckptfmt.ports.backend import Backend, CachedRange

log = logging.getLogger("ckptfmt")

_DISTANT_THREADS: Final = 16
"""Requests in flight where each waits for a round trip."""
_DISTANT_GAP_BYTES: Final = 1 << 20
"""A request there costs more than so many bytes."""


@dataclass(frozen=True)
class Copy:
    """An object that should hold the bytes of a pack."""

    tier: Tier
    key: str

    @property
    def identity(self) -> tuple[str, str]:
        return self.tier.uuid, self.key

    @property
    def path(self) -> Path | None:
        """The file that it is, on a local file system; None elsewhere."""
        backend = self.tier.backend
        if not (backend.traits.local and backend.url.startswith("file:")):
            return None
        return root_path(backend.url) / self.key


def by_nearness(site: Site) -> tuple[Tier, ...]:
    """All tiers of a repository: its stage, places on local file systems, the durable tier, other replicas."""
    durable = Tier(site.repository, "durable", site.backend)
    return tuple(
        sorted(
            (durable, *site.tiers.every()),
            key=lambda tier: (tier.role != "stage", not tier.backend.traits.local, tier.role != "durable"),
        )
    )


class Nearest:
    """Reads the packs of one generation. Thread-safe."""

    def __init__(self, site: Site) -> None:
        self.tiers = by_nearness(site)
        self.log = ReadLog(self.tiers)
        self.repairs = Repairs()
        self._lock = threading.Lock()
        self._doubtful: set[tuple[str, str]] = set()
        """Copies that could not be read: tried last from then on."""

    # -- what is there -------------------------------------------------------------------------
    def require(self, folder: str, manifest: Manifest) -> None:
        """Every pack is on some tier with its length. Raises what ``protocol.check_packs`` does for the durable tier;
        farther ones are asked only for what nearer ones lack."""
        left = {protocol.pack_key(folder, pack): pack for pack in manifest.packs}
        wrong: list[tuple[Copy, CkptError]] = []
        for tier in self.tiers:
            try:
                faults = protocol.pack_faults(tier.backend, folder, manifest, list(left.values()))
            except BackendError as error:
                faults = dict.fromkeys(left, error)
            wrong += [(Copy(tier, key), fault) for key, fault in faults.items()]
            left = {key: left[key] for key in faults if not self._is_repaired(tier, key, left[key].nbytes)}
            if not left:
                break
        for copy, fault in wrong:
            self._doubt(copy)
            self.log.wrong(copy.tier, copy.key, fault, moved_on=copy.key not in left)
        durable = {copy.key: fault for copy, fault in wrong if copy.tier.role == "durable" and copy.key in left}
        for fault in durable.values():
            if isinstance(fault, BackendError):  # says nothing of single packs
                raise fault
        protocol.raise_faults(durable)

    def _is_repaired(self, tier: Tier, key: str, nbytes: int) -> bool:
        for repaired in self.repairs.of(tier, key):
            try:
                if tier.backend.head(repaired).nbytes == nbytes:
                    return True
            except (NotFound, BackendError):
                continue
        return False

    # -- reading -------------------------------------------------------------------------------
    def threads(self, packs: Iterable[str]) -> int:
        """How many threads read ``packs`` best."""
        return max((self.threads_on(self._first(pack).tier) for pack in packs), default=IO_THREADS)

    @staticmethod
    def threads_on(tier: Tier) -> int:
        """How many threads read from ``tier`` best."""
        return _DISTANT_THREADS if tier.backend.traits.distant else IO_THREADS

    def gap_bytes(self, pack: str) -> int:
        """Wanted ranges of ``pack`` closer than this are read through: one request costs more than what is between."""
        return _DISTANT_GAP_BYTES if self.is_distant(pack) else GAP_BYTES

    def is_distant(self, pack: str) -> bool:
        """Whether each request for ``pack`` waits for a round trip."""
        return self._first(pack).tier.backend.traits.distant

    def map_cached(self, pack: str, offset: int, memory: memoryview) -> CachedRange | None:
        """``Backend.map_cached`` of the copy that would be read."""
        copy = self._first(pack)
        try:
            return copy.tier.backend.map_cached(copy.key, offset, memory)
        except (BackendError, NotFound, Corrupt):
            if len(self.tiers) == 1:
                raise
            return None  # whoever reads it moves on to another tier

    def shown(self, pack: str, nbytes: int) -> None:
        """Bytes of what ``map_cached`` gave were compared with their digests."""
        self.log.read(self._first(pack).tier, nbytes)

    def fill(
        self,
        pack: str,
        start: int,
        target: memoryview,
        chunks: Sequence[Chunk],
        *,
        verify: bool = True,
        is_read: bool = False,
    ) -> None:
        """Fill ``target`` from ``start`` on, so that ``chunks``, which lie in that range of ``pack``, are what their
        digests say. Without ``verify`` from the first copy that can be read; they need not be whole then.
        ``is_read``: that much has been done, and only the digests have not been compared.

        ``Corrupt`` naming tensor, object and offset, ``NotFound`` or ``BackendError`` if no copy has them: what is
        wrong with that on the durable tier, and which others were tried.
        """
        wrong: list[tuple[Copy, CkptError]] = []
        left, error = chunks, None
        for number, copy in enumerate(self.copies(pack)):
            had, whole = left, len(left) == len(chunks)
            error = _failure(copy, start, target) if whole and (number or not is_read) else None
            if error is None:
                left, error = self._compare(copy, start, target, had, is_read=whole) if verify else ((), None)
            self.log.read(copy.tier, _nbytes(had) - _nbytes(left))
            if error is None:
                break
            wrong.append((copy, error))
        self.tell(wrong, moved_on=error is None)
        if error is not None:
            self.repairs.forget()
            raise _told(wrong)

    def _compare(
        self, copy: Copy, start: int, target: memoryview, chunks: Sequence[Chunk], *, is_read: bool
    ) -> tuple[Sequence[Chunk], CkptError | None]:
        """Which of ``chunks``, that have been read or are read one by one, this copy lacks, and why."""
        left: list[Chunk] = []
        first: CkptError | None = None
        for chunk in chunks:
            box, number, offset, nbytes = chunk
            data = target[offset - start : offset - start + nbytes]
            if is_read and checksum.digest(data) == box.digests[number]:
                continue
            wrong = self._settle(copy, chunk, data, is_read=is_read)
            if wrong is not None:
                left.append(chunk)
                first = first or wrong
        return left, first

    def _settle(self, copy: Copy, chunk: Chunk, data: memoryview, *, is_read: bool) -> CkptError | None:
        """Compare a chunk with its digest; while it differs, read it once more. Returns what is wrong in the end."""
        box, number, offset, _ = chunk
        differs: CkptError | None = None
        for attempt in range(1 + RETRIES):
            if attempt or not is_read:
                try:
                    _read(copy, offset, data)
                except (BackendError, NotFound, Corrupt) as error:
                    return error
            try:
                check_chunk(box, number, offset, data)
            except Corrupt as error:
                differs = error
                continue
            if differs is not None:
                self.log.read_again(copy.tier, differs, attempt)
            return None
        return differs

    # -- copies --------------------------------------------------------------------------------
    def tell(self, wrong: Iterable[tuple[Copy, CkptError]], *, moved_on: bool) -> None:
        """Log what was wrong with copies. ``moved_on``: another one had what was wanted."""
        for copy, error in wrong:
            if not _differs(error):  # a damaged chunk is no reason to read all others from farther away
                self._doubt(copy)
            self.log.wrong(copy.tier, copy.key, error, moved_on=moved_on)

    def copies(self, pack: str) -> Iterator[Copy]:
        """Nearest first. Repairs of a copy follow it, and are looked for only by who gets that far; what could not be
        read before comes last."""
        doubtful = []
        for tier in self.tiers:
            copy = Copy(tier, pack)
            if self._is_doubtful(copy):
                doubtful.append(copy)
            else:
                yield copy
            for key in self.repairs.of(tier, pack):
                copy = Copy(tier, key)
                if self._is_doubtful(copy):
                    doubtful.append(copy)
                else:
                    yield copy
        yield from doubtful

    def _first(self, pack: str) -> Copy:
        return next(self.copies(pack))

    def _is_doubtful(self, copy: Copy) -> bool:
        with self._lock:
            return copy.identity in self._doubtful

    def _doubt(self, copy: Copy) -> None:
        with self._lock:
            self._doubtful.add(copy.identity)


def _differs(error: CkptError) -> bool:
    """Whether bytes were read and are not what their digest says, other than that too few are there."""
    return isinstance(error, Corrupt) and error.kind == Corrupt.default_kind


def _failure(copy: Copy, start: int, target: memoryview) -> CkptError | None:
    """Read a range; what is in the way, if anything is."""
    try:
        _read(copy, start, target)
    except (BackendError, NotFound, Corrupt) as error:
        return error
    return None


def _read(copy: Copy, start: int, target: memoryview) -> None:
    """In two where the range begins inside a block: the blocks by themselves take the backend's fast path."""
    backend: Backend = copy.tier.backend
    head = -start % backend.traits.alignment
    if head and len(target) > head + backend.traits.alignment:
        backend.read_into(copy.key, start, target[:head])
        backend.read_into(copy.key, start + head, target[head:])
    else:
        backend.read_into(copy.key, start, target)


def _nbytes(chunks: Sequence[Chunk]) -> int:
    return sum(nbytes for *_, nbytes in chunks)


def _told(wrong: Sequence[tuple[Copy, CkptError]]) -> CkptError:
    """What the durable tier said, which alone decides, with the other places that were tried."""
    of_durable = [error for copy, error in wrong if copy.tier.role == "durable"]
    error = of_durable[0] if of_durable else wrong[0][1]
    others = [f"{copy.tier.name}: {other.kind}" for copy, other in wrong if other is not error]
    if others:
        error.message += f"; tried in vain as well: {', '.join(others)}"
    return error
