"""The boxes of several parts as one table, each once, and what ranks claim to hold besides compared with it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from itertools import chain, repeat
from operator import itemgetter
from typing import Any, Final

from ckptfmt.format.merge_rows import TensorUnion
from ckptfmt.format.part import Part
from ckptfmt.format.tables import BoxTable, Extent, PackRow

_Stored = tuple[Extent, Extent, int, int, str, int]
"""A box as some rank wrote it: start, size, pack of the union, offset, digests, rank."""
_WHERE = itemgetter(0, 1)
_DIGESTS: Final = 4
_RANK: Final = 5
_SHOWN: Final = 8


class BoxUnion:
    """Each distinct box of ``parts`` (by rank) as the lowest rank wrote it, and all packs. Replicas that differ, and
    claims that nobody wrote, are added to ``problems``."""

    def __init__(self, parts: Sequence[Part], tensors: TensorUnion, problems: list[str]) -> None:
        self._tensors = tensors
        self.packs: list[PackRow] = []
        self._stored: list[list[_Stored]] = [[] for _ in tensors.all.name]
        self._claimed = bytearray(len(self._stored))
        self._differing: dict[tuple[int, Extent, Extent], tuple[int, list[int]]] = {}
        """Row and box -> who wrote it, and the ranks whose copies differ."""
        self._unwritten: dict[tuple[int, Extent, Extent], list[int]] = {}
        for part, rows, packs in zip(parts, tensors.rows, self._unite_packs(parts, problems), strict=True):
            table = part.boxes
            columns = (table.start, table.size, map(packs.__getitem__, table.pack), table.offset, table.digests)
            stored = zip(*columns, repeat(part.rank), strict=False)
            for row, box in zip(map(rows.__getitem__, table.tensor), stored, strict=False):
                self._stored[row].append(box)
        for row, boxes in enumerate(self._stored):
            if len(boxes) > 1:
                boxes.sort()
                if len(set(map(_WHERE, boxes))) < len(boxes):
                    self._stored[row] = self._once(row, boxes)
        for part, rows in zip(parts, tensors.rows, strict=True):
            if part.claims.tensor:
                self._check_claims(part, rows)
        self._tell(problems)

    def _unite_packs(self, parts: Sequence[Part], problems: list[str]) -> list[list[int]]:
        """Where each part's packs stand in the union."""
        index: dict[tuple[str | None, str], int] = {}
        places = []
        for part in parts:
            at = []
            for pack in part.packs:
                i = index.setdefault((pack.generation, pack.name), len(self.packs))
                if i == len(self.packs):
                    self.packs.append(pack)
                elif self.packs[i] != pack:
                    problems.append(f"pack {pack.name} is described differently by rank {part.rank} and a lower one")
                at.append(i)
            places.append(at)
        return places

    def _once(self, row: int, boxes: Sequence[_Stored]) -> list[_Stored]:
        """Several ranks wrote one box: the lowest one's is taken."""
        found: dict[tuple[Extent, Extent], _Stored] = {}
        for box in sorted(boxes, key=itemgetter(0, 1, _RANK)):
            seen = found.setdefault(_WHERE(box), box)
            if seen[_DIGESTS] != box[_DIGESTS]:
                self._differ(row, seen, box[_RANK])
        return list(found.values())

    def _check_claims(self, part: Part, rows: Sequence[int]) -> None:
        table = part.claims
        columns = (map(rows.__getitem__, table.tensor), table.start, table.size, table.digests)
        for row, start, size, digests in zip(*columns, strict=True):
            self._claimed[row] = 1
            seen = _find(self._stored[row], start, size)
            if seen is None:
                self._unwritten.setdefault((row, start, size), []).append(part.rank)
            elif digests and seen[_DIGESTS] != digests:
                self._differ(row, seen, part.rank)

    def _differ(self, row: int, seen: _Stored, rank: int) -> None:
        self._differing.setdefault((row, *_WHERE(seen)), (seen[_RANK], []))[1].append(rank)

    def _tell(self, problems: list[str]) -> None:
        for (row, start, size), (writer, ranks) in self._differing.items():
            whose = (
                f"the replicas of ranks {writer} and {ranks[0]} differ"
                if len(ranks) == 1
                else f"the replicas of ranks {_shown(ranks)} differ from that of rank {writer}"
            )
            problems.append(f"{self._box(row, start, size)}: {whose}; if each rank keeps its own, mark it PerRank")
        for (row, start, size), ranks in self._unwritten.items():
            lacking = self._tensors.lacking(row)
            why = f"; the tensor is not in the state of ranks {_shown(lacking)}" if lacking else ""
            word, verb = ("rank", "holds") if len(ranks) == 1 else ("ranks", "hold")
            problems.append(
                f"{self._box(row, start, size)}: {word} {_shown(ranks)} {verb} a replica that no rank wrote{why}"
            )

    def _box(self, row: int, start: Extent, size: Extent) -> str:
        return f"tensor {self._tensors.all.name[row]!r}, box {list(start)}+{list(size)}"

    def check_aliases(self, aliases: Mapping[str, str], problems: list[str]) -> set[int]:
        """Return the rows of tensors that are tied to others. Ranks that hold nothing of a tensor can't tell whether it
        is tied: those that do decide, and must agree."""
        tied: set[int] = set()
        for other, name in aliases.items():
            row = self._tensors.row_of(other)
            if row is None:
                continue
            if self._stored[row] or self._claimed[row]:
                problems.append(f"{other!r} is tied to {name!r} on some ranks, and a tensor of its own on others")
            tied.add(row)
        return tied

    def table(self, dropped: Collection[int]) -> BoxTable:
        """All boxes in the order of the tensors, then of their starts; without those of ``dropped`` rows."""
        kept = [boxes for row, boxes in enumerate(self._stored) if row not in dropped]
        flat = list(chain.from_iterable(kept))
        return BoxTable(
            tensor=list(chain.from_iterable(map(repeat, range(len(kept)), map(len, kept)))),
            start=[box[0] for box in flat],
            size=[box[1] for box in flat],
            pack=[box[2] for box in flat],
            offset=[box[3] for box in flat],
            digests=[box[4] for box in flat],
        )


def _find(boxes: Sequence[_Stored], start: Extent, size: Extent) -> _Stored | None:
    """Find a box among those of one tensor, which are sorted."""
    where: Any = (start, size)
    i = bisect_left(boxes, where) if len(boxes) > 1 else 0
    return boxes[i] if i < len(boxes) and boxes[i][:2] == where else None


def _shown(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:_SHOWN])) + (", ..." if len(ranks) > _SHOWN else "")
