"""Where every leaf's bytes go: packs, offsets, and the units in which a pack is hashed and written.

A plan depends only on the structure of the state (names, dtypes, shapes, boxes and who holds them), so it is kept
between saves of the same structure. In the arena a unit lies exactly as it will lie in its file,
header included, so a write needs no copy.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Final

from ckptfmt.engine.drafts import Draft, draft_packs
from ckptfmt.engine.units import Held, Unit, Window, align_down, align_up, cut
from ckptfmt.errors import InvalidInput
from ckptfmt.ports.arrays import LeafSpec

WINDOW_BYTES: Final = 64 << 20
"""Host memory through which packs pass that are not held whole: room for the unit that each of four threads writes."""
HOST_BYTES_MIN: Final = WINDOW_BYTES
"""Below it the threads that write would wait for one another."""
HASH_WINDOW_BYTES: Final = WINDOW_BYTES
"""Most host memory through which claims pass that are hashed while training is blocked and do not lie in host memory.
No more than ``WINDOW_BYTES``: units that pass use it after them, and ``HOST_BYTES_MIN`` has room for one of the two."""

Signature = tuple[tuple[Hashable, ...], ...]


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


def _passing(drafts: Sequence[Draft], host_bytes_max: int | None, comparison: Comparison) -> tuple[int, Window]:
    """How many packs, the first ones, pass through the window, and the window: it lies behind what is held whole."""
    sync_packs = sum(draft.sync for draft in drafts)
    rest = sum(align_up(draft.layout.nbytes) for draft in drafts[sync_packs:])
    beside = WINDOW_BYTES if sync_packs else comparison.window_bytes
    if host_bytes_max is None or rest + beside <= host_bytes_max:
        return sync_packs, Window(rest, WINDOW_BYTES)
    return len(drafts), Window(0, align_down(host_bytes_max))


def _placed(drafts: Sequence[Draft], sizes: Sequence[int], passing: int, window: Window) -> tuple[PackPlan, ...]:
    """Give the units of each pack a place: those of the first ``passing`` in the ``window``, the others one behind the
    other from the beginning of the arena on."""
    packs: list[PackPlan] = []
    held_bytes = 0
    for number, draft in enumerate(drafts):
        layout = draft.layout
        room = window if number < passing else Held(held_bytes)
        packs.append(
            PackPlan(
                header=layout.header,
                header_digest=layout.header_digest,
                nbytes=layout.nbytes,
                leaves=tuple(draft.members),
                offsets=tuple(layout.offsets),
                units=tuple(cut(number, draft.members, layout, sizes, room)),
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


def _columns(packs: Sequence[PackPlan], sizes: Sequence[int]) -> Columns:
    rows = [
        (leaf, planned.arena_offset + offset, sizes[leaf])
        for planned in packs
        if planned.arena_offset is not None
        for leaf, offset in zip(planned.leaves, planned.offsets, strict=True)
        if sizes[leaf]
    ]
    return Columns(*map(tuple, zip(*rows, strict=True))) if rows else Columns((), (), ())
