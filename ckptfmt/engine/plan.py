"""Where every leaf's bytes go: packs, offsets, and the units in which a pack is hashed and written.

A plan depends only on the structure of the state (names, dtypes, shapes, boxes and who holds them), so it is kept
between saves of the same structure. In the arena a unit lies exactly as it will lie in its file,
header included, so a write needs no copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from ckptfmt.engine.drafts import Draft, draft_packs
from ckptfmt.engine.transfer import IO_BYTES
from ckptfmt.errors import InvalidInput
from ckptfmt.format import checksum, pack
from ckptfmt.ports.arrays import LeafSpec

ALIGNMENT = 4096
WINDOW_BYTES: Final = 64 << 20
"""Host memory through which packs pass that are not held whole: room for the unit that each of four threads writes."""
HOST_BYTES_MIN: Final = WINDOW_BYTES
"""Below it the threads that write would wait for one another."""
HASH_WINDOW_BYTES: Final = WINDOW_BYTES
"""Most host memory through which claims pass that are hashed while training is blocked and do not lie in host memory.
No more than ``WINDOW_BYTES``: units that pass use it after them, and ``HOST_BYTES_MIN`` has room for one of the two."""

Signature = tuple[tuple[Hashable, ...], ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """One span to be hashed: ``leaf`` counts in the plan's leaves, ``number`` in the leaf's chunks, ``offset`` in the
    pack file."""

    leaf: int
    number: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Unit:
    """A range of a pack file written at once, with the chunks that begin in it.

    In the arena lie the bytes ``start`` to ``end``: the last chunk may reach past ``stop``. Where units pass through
    the window, so that no other shares their memory, by less than a page.
    """

    pack: int
    start: int
    stop: int
    end: int
    chunks: tuple[Chunk, ...]
    leaves: frozenset[int]
    """All leaves that have bytes in the range or in the chunks."""
    place: int
    """Offset of its first byte in the arena."""
    turn: int | None
    """Its number among the units that pass through the window; None if its pack is held whole."""
    after: int
    """So many units must have left the window before: some of them lie in its place."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in the arena."""
        return self.end - self.start


@dataclass(frozen=True)
class PackPlan:
    header: bytes
    header_digest: str
    nbytes: int
    leaves: tuple[int, ...]
    """Leaf indices in file order."""
    offsets: tuple[int, ...]
    """Absolute file offset of each, in the same order."""
    units: tuple[Unit, ...]
    arena_offset: int | None
    """Where the whole pack lies in the arena; None if it passes through the window, unit by unit."""
    claims: bool = False
    """Whether its leaves are another rank's to write: it has no header, is only hashed, and becomes no file."""


@dataclass(frozen=True)
class Columns:
    """The leaves that are held whole: index, place in the arena and size in bytes of each that has bytes."""

    leaves: tuple[int, ...]
    places: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Roles:
    """What becomes of the leaves that this rank does not write, by index."""

    claims: frozenset[int] = frozenset()
    """Boxes that another rank writes."""
    bare: frozenset[int] = frozenset()
    """Leaves without a box: this rank holds nothing of the tensor."""


ALL_WRITTEN: Final = Roles()


@dataclass(frozen=True)
class Comparison:
    """How the claims are compared with what their writers write: by the digests of both."""

    compared: bool = True
    """Whether at all; if not, they are not even copied."""
    hashed: frozenset[int] = frozenset()
    """Those whose digests are taken when the snapshot is; the others are frozen, and hashed in the background."""
    window_bytes: int = 0
    """Host memory through which the ``hashed`` ones pass."""


IN_BACKGROUND: Final = Comparison()
NOT_COMPARED: Final = Comparison(compared=False)


@dataclass(frozen=True)
class SavePlan:
    packs: tuple[PackPlan, ...]
    arena_bytes: int
    tensor_bytes: int
    """Of what this rank writes."""
    held: Columns
    passing: tuple[Unit, ...]
    """The units that pass through the window, in the order of their turns."""
    sync_turns: int
    """So many of them, the first ones, are to be written while training is blocked."""
    roles: Roles
    """What of the leaves this rank does not write."""
    hashed: frozenset[int]
    """The claims whose digests are taken when the snapshot is: they are in no pack."""
    hash_window: slice
    """The part of the arena through which they pass; units that pass through the window may use it after them."""


def signature_of(leaves: Sequence[tuple[str, LeafSpec]]) -> Signature:
    """All that a plan depends on, and who writes what: of an address, whether there is one. The states of generators
    lie elsewhere at each save."""
    return tuple(
        [(name, s.dtype, s.global_shape, s.start, s.size, s.kind, s.holders, s.address is None) for name, s in leaves]
    )


def make_plan(
    leaves: Sequence[tuple[str, LeafSpec]],
    *,
    sync: Collection[int] = (),
    host_bytes_max: int | None = None,
    roles: Roles = ALL_WRITTEN,
    comparison: Comparison = IN_BACKGROUND,
) -> SavePlan:
    """Lay ``leaves`` out in packs. Pure arithmetic: nothing is allocated or written.

    The leaves in ``sync`` get packs of their own, the first ones, which pass through the window. With a
    ``host_bytes_max`` (bytes) that cannot hold the rest as well, all packs do. Of the claims among the ``roles``
    only the digests are taken, and only as the ``comparison`` wants them.
    """
    written = [index for index in range(len(leaves)) if index not in roles.claims and index not in roles.bare]
    claimed = sorted(roles.claims - comparison.hashed) if comparison.compared else []
    drafts = draft_packs(leaves, written, claimed, sync)
    sizes = [spec.nbytes for _, spec in leaves]
    passing, window = _passing(drafts, host_bytes_max, comparison)
    packs = _placed(drafts, sizes, passing, window)
    turns = tuple([unit for planned in packs[:passing] for unit in planned.units])
    return SavePlan(
        packs=packs,
        arena_bytes=window.offset + max(window.used, comparison.window_bytes),
        tensor_bytes=sum(sizes) - sum(map(sizes.__getitem__, roles.claims)),
        held=_columns(packs, sizes),
        passing=turns,
        sync_turns=sum(drafts[unit.pack].sync for unit in turns),
        roles=roles,
        hashed=comparison.hashed,
        hash_window=slice(window.offset, window.offset + comparison.window_bytes),
    )


def _passing(drafts: Sequence[Draft], host_bytes_max: int | None, comparison: Comparison) -> tuple[int, _Window]:
    """How many packs, the first ones, pass through the window, and the window: it lies behind what is held whole."""
    sync_packs = sum(draft.sync for draft in drafts)
    rest = sum(align_up(draft.layout.nbytes) for draft in drafts[sync_packs:])
    beside = WINDOW_BYTES if sync_packs else comparison.window_bytes
    if host_bytes_max is None or rest + beside <= host_bytes_max:
        return sync_packs, _Window(rest, WINDOW_BYTES)
    return len(drafts), _Window(0, align_down(host_bytes_max))


def _placed(drafts: Sequence[Draft], sizes: Sequence[int], passing: int, window: _Window) -> tuple[PackPlan, ...]:
    """Give the units of each pack a place: those of the first ``passing`` in the ``window``, the others one behind the
    other from the beginning of the arena on."""
    packs: list[PackPlan] = []
    held_bytes = 0
    for number, draft in enumerate(drafts):
        layout = draft.layout
        room = window if number < passing else _Held(held_bytes)
        packs.append(
            PackPlan(
                header=layout.header,
                header_digest=layout.header_digest,
                nbytes=layout.nbytes,
                leaves=tuple(draft.members),
                offsets=tuple(layout.offsets),
                units=tuple(_cut(number, draft.members, layout, sizes, room)),
                arena_offset=None if room is window else held_bytes,
                claims=draft.claims,
            )
        )
        if room is not window:
            held_bytes += align_up(layout.nbytes)
    return tuple(packs)


def check_host_bytes_max(host_bytes_max: int | None, *, arenas: int = 1) -> None:
    """Raise ``InvalidInput`` unless each of ``arenas`` snapshots gets enough of ``host_bytes_max`` bytes to work in."""
    if host_bytes_max is None:
        return
    if not isinstance(host_bytes_max, int) or isinstance(host_bytes_max, bool):
        raise InvalidInput(f"host_bytes_max={host_bytes_max!r}: give a whole number of bytes")
    if host_bytes_max // arenas < HOST_BYTES_MIN:
        raise InvalidInput(
            f"host_bytes_max={host_bytes_max}: at least {HOST_BYTES_MIN * arenas} bytes are needed, which is what the "
            f"threads that write hold at once{f', for each of {arenas} saves in flight' if arenas > 1 else ''}"
        )


def align_up(value: int) -> int:
    return -(-value // ALIGNMENT) * ALIGNMENT


def align_down(value: int) -> int:
    return value // ALIGNMENT * ALIGNMENT


def _columns(packs: Sequence[PackPlan], sizes: Sequence[int]) -> Columns:
    rows = [
        (leaf, planned.arena_offset + offset, sizes[leaf])
        for planned in packs
        if planned.arena_offset is not None
        for leaf, offset in zip(planned.leaves, planned.offsets, strict=True)
        if sizes[leaf]
    ]
    return Columns(*map(tuple, zip(*rows, strict=True))) if rows else Columns((), (), ())


def _cut(
    number: int, members: Sequence[int], layout: pack.PackLayout, sizes: Sequence[int], room: _Held | _Window
) -> Iterator[Unit]:
    """Cut a pack file into units of about ``IO_BYTES``; the first ones hold the header."""
    chunks = _chunks(members, layout, sizes)
    if isinstance(room, _Held):
        ranges = _evenly(chunks, layout.nbytes)
    else:
        ranges = _at_chunk_ends(chunks, len(layout.header), layout.nbytes)
    for start, stop, end, begun, leaves in ranges:
        place, turn, after = room.place(start, end)
        yield Unit(number, start, stop, end, tuple(begun), frozenset(leaves), place, turn, after)


_Range = tuple[int, int, int, list[Chunk], set[int]]
"""``start``, ``stop``, ``end``, ``chunks`` and ``leaves`` of a unit."""


def _chunks(members: Sequence[int], layout: pack.PackLayout, sizes: Sequence[int]) -> Iterator[Chunk]:
    for leaf, offset in zip(members, layout.offsets, strict=True):
        for at, (inner, length) in enumerate(checksum.chunk_spans(sizes[leaf], checksum.CHUNK_BYTES)):
            yield Chunk(leaf, at, offset + inner, length)


def _evenly(chunks: Iterator[Chunk], nbytes: int) -> Iterator[_Range]:
    """Of ``IO_BYTES`` each, as the parts of an upload are: of other units parts would have to be put together."""
    ahead = next(chunks, None)
    last: Chunk | None = None
    for start in range(0, nbytes, IO_BYTES):
        stop = min(start + IO_BYTES, nbytes)
        # The chunk that the unit before has begun may reach into this one.
        leaves = {last.leaf} if last is not None and last.offset + last.nbytes > start else set()
        begun: list[Chunk] = []
        while ahead is not None and ahead.offset < stop:
            begun.append(ahead)
            leaves.add(ahead.leaf)
            last, ahead = ahead, next(chunks, None)
        yield start, stop, max(stop, last.offset + last.nbytes) if begun and last else stop, begun, leaves


def _at_chunk_ends(chunks: Iterator[Chunk], header_bytes: int, nbytes: int) -> Iterator[_Range]:
    """At the page below the end of a chunk. No unit is longer than ``IO_BYTES`` + one chunk + a page."""
    start = 0
    while header_bytes - start >= IO_BYTES:
        yield start, start + IO_BYTES, start + IO_BYTES, [], set()
        start += IO_BYTES
    begun: list[Chunk] = []
    touched: set[int] = set()
    for chunk in chunks:
        begun.append(chunk)
        touched.add(chunk.leaf)
        end = chunk.offset + chunk.nbytes
        stop = align_down(end)
        if stop - start >= IO_BYTES:
            yield start, stop, end, begun, touched
            start, begun, touched = stop, [], {chunk.leaf}
    if start < nbytes:
        yield start, nbytes, nbytes, begun, touched


class _Held:
    """Room for a whole pack, from ``offset`` in the arena on."""

    def __init__(self, offset: int) -> None:
        self._offset = offset

    def place(self, start: int, end: int) -> tuple[int, None, int]:
        return self._offset + start, None, 0


class _Window:
    """Room of ``nbytes`` from ``offset`` on, which units use one after the other, lap by lap."""

    def __init__(self, offset: int, nbytes: int) -> None:
        self.offset = offset
        self._nbytes = nbytes
        self._at = 0
        self._turn = 0
        self._after = 0
        self._lap: deque[tuple[int, int]] = deque()
        """(first byte, turn) of this lap's units."""
        self._before: deque[tuple[int, int]] = deque()
        """Those of the lap before whose place has not been taken yet."""
        self.used = 0

    def place(self, start: int, end: int) -> tuple[int, int, int]:
        length = align_up(end - start)
        if self._at + length > self._nbytes:
            self._before, self._lap, self._at = self._lap, deque(), 0
        place, self._at = self._at, self._at + length
        while self._before and self._before[0][0] < self._at:
            self._after = self._before.popleft()[1] + 1
        self._lap.append((place, self._turn))
        self._turn += 1
        self.used = max(self.used, self._at)
        return self.offset + place, self._turn - 1, self._after
