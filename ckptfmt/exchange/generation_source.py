"""The tensors of a committed generation, verified as they are read, as the same pieces that files of others have."""

from __future__ import annotations

from ckptfmt.engine.opened import Opened
from ckptfmt.engine.read_plan import StoredBox
from ckptfmt.engine.stored import Stored
from ckptfmt.errors import Mismatch
from ckptfmt.exchange.pieces import SourceBox, SourceTensor
from ckptfmt.format.naming import ranks_shown
from ckptfmt.views.box_bytes import BoxBytes, VerifiedBytes


class _StoredBytes:
    """The bytes of one stored box."""

    __slots__ = ("_box", "_source")

    def __init__(self, source: BoxBytes, box: StoredBox) -> None:
        self._source = source
        self._box = box

    def read_into(self, first: int, memory: memoryview) -> None:
        if memory.nbytes:
            memory[:] = self._source.read(self._box, first, first + memory.nbytes)


def every_tensor(opened: Opened) -> dict[str, SourceTensor]:
    """All tensors by name, tied names too; what several ranks kept for themselves has ``(rank N)`` beside its name."""
    source = VerifiedBytes(opened)
    found: dict[str, SourceTensor] = {}
    for name in [*opened.index, *opened.manifest.aliases]:
        entries = opened.stored.every(name)
        for entry in entries:
            found[name if entry.rank < 0 else f"{name} (rank {entry.rank})"] = _of_stored(source, entry)
    return found


def tensor_of(opened: Opened, source: BoxBytes, name: str, rank: int | None) -> SourceTensor:
    """One tensor: of what several ranks kept for themselves that of ``rank``. ``Mismatch`` names the ranks if it is
    None and there are several, or is none of them."""
    every = opened.stored.every(name)
    entries = [entry for entry in every if entry.rank < 0 or rank in (None, entry.rank)]
    if len(entries) != 1:
        keepers = sorted(entry.rank for entry in every)
        raise Mismatch(
            f"tensor {name!r} of {opened.name} was kept by {ranks_shown(keepers)}, each for itself: "
            "say whose is meant (--rank), or leave it out (--exclude)",
            kind="rank_not_chosen",
        )
    return _of_stored(source, entries[0])


def _of_stored(source: BoxBytes, stored: Stored) -> SourceTensor:
    boxes = tuple(SourceBox(box.start, box.size, _StoredBytes(source, box)) for box in stored.boxes)
    return SourceTensor(stored.name, stored.dtype, stored.shape, boxes, stored.boxes[0].pack)
