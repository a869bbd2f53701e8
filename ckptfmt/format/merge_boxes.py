"""The boxes of several parts as one table, each once, and what ranks claim to hold besides compared with it.

There may be a million boxes, so they stay columns: one part's behind the other's, and an order in which to read them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate, chain, islice, repeat
from operator import lt
from typing import Any, Final

from ckptfmt.format.alike import Alike
from ckptfmt.format.merge_order import BoxOrder
from ckptfmt.format.merge_rows import TensorUnion
from ckptfmt.format.naming import ranks_shown
from ckptfmt.format.part import Part
from ckptfmt.format.tables import BoxTable, Extent, PackRow, runs

_ADVICE: Final = (
    "; make equal before you save what is to be equal (DistributedDataParallel leaves each rank its own statistics of "
    "BatchNorm), or mark what each rank keeps for itself PerRank"
)


class BoxUnion:
    """Each distinct box of ``parts`` (by rank) as the lowest rank wrote it, and all packs. Replicas that differ, and
    claims that nobody wrote, are added to ``problems``."""

    def __init__(self, parts: Sequence[Part], tensors: TensorUnion, problems: list[str]) -> None:
        self._parts = parts
        self._tensors = tensors
        self.packs: list[PackRow] = []
        self._pack_places = self._unite_packs(parts, problems)
        self._first_box = list(accumulate([len(part.boxes.tensor) for part in parts], initial=0))
        self._differing: dict[tuple[int, Extent, Extent], tuple[int, list[int]]] = {}
        """Row and box -> who wrote it, and the ranks whose copies differ."""
        self._unwritten: dict[tuple[int, Extent, Extent], list[int]] = {}
        self._start = self._column("start")
        self._size = self._column("size")
        self._digests = self._column("digests")
        self._order = BoxOrder(parts, tensors.rows)
        self._starts = self._order.taken(self._start)
        self._sort()
        self._run_of = {row: (first, last) for row, first, last in runs(self._order.rows)}
        self._claimed: set[int] = set()
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

    def _column(self, name: str) -> list[Any]:
        return list(chain.from_iterable(getattr(part.boxes, name) for part in self._parts))

    def _rank_of(self, box: int) -> int:
        return self._parts[bisect_right(self._first_box, box) - 1].rank

    def _sort(self) -> None:
        """Bring the boxes of each row into the order of their starts, and leave out those that a lower rank wrote."""
        changed: list[tuple[int, int, int]] = []
        ascend = Alike(_ascend)
        for row, first, last in runs(self._order.rows):
            if last - first > 1 and not ascend(self._starts[first:last]):
                changed.append((row, first, last))
        for row, first, last in reversed(changed):
            self._order.change(row, first, last, self._once(row, self._order.at[first:last]))
        if changed:
            self._starts = self._order.taken(self._start)

    def _once(self, row: int, boxes: Sequence[int]) -> list[int]:
        found: dict[tuple[Extent, Extent], int] = {}
        for box in sorted(boxes, key=lambda box: (self._start[box], self._size[box], box)):
            seen = found.setdefault((self._start[box], self._size[box]), box)
            if self._digests[seen] != self._digests[box]:
                self._differ(row, seen, self._rank_of(box))
        return list(found.values())

    def _check_claims(self, part: Part, rows: Sequence[int]) -> None:
        table = part.claims
        claimed = list(map(rows.__getitem__, table.tensor))
        self._claimed.update(claimed)
        for row, start, size, digests in zip(claimed, table.start, table.size, table.digests, strict=True):
            seen = self._find(row, start, size)
            if seen is None:
                self._unwritten.setdefault((row, start, size), []).append(part.rank)
            elif digests and self._digests[seen] != digests:
                self._differ(row, seen, part.rank)

    def _find(self, row: int, start: Extent, size: Extent) -> int | None:
        """The place in the columns of the box that is written for ``row``, or None."""
        first, last = self._run_of.get(row, (0, 0))
        if last - first > 1:
            first = bisect_left(self._starts, start, first, last)
            last = bisect_right(self._starts, start, first, last)
        if last - first > 1:  # boxes of no elements: several begin at one place, by size
            first = bisect_left(self._order.at, size, first, last, key=self._size.__getitem__)
        if first == last or self._starts[first] != start:
            return None
        box = self._order.at[first]
        return box if self._size[box] == size else None

    def _differ(self, row: int, seen: int, rank: int) -> None:
        box = (row, self._start[seen], self._size[seen])
        self._differing.setdefault(box, (self._rank_of(seen), []))[1].append(rank)

    def _tell(self, problems: list[str]) -> None:
        advice = _ADVICE
        for (row, start, size), (writer, ranks) in self._differing.items():
            whose = (
                f"the replicas of ranks {writer} and {ranks[0]} differ"
                if len(ranks) == 1
                else f"the replicas of {ranks_shown(ranks)} differ from that of rank {writer}"
            )
            problems.append(f"{self._box(row, start, size)}: {whose}{advice}")
            advice = ""
        for (row, start, size), ranks in self._unwritten.items():
            lacking = self._tensors.lacking(row)
            why = f"; the tensor is not in the state of {ranks_shown(lacking)}" if lacking else ""
            verb = "holds" if len(ranks) == 1 else "hold"
            problems.append(
                f"{self._box(row, start, size)}: {ranks_shown(ranks)} {verb} a replica that no rank wrote{why}"
            )

    def _box(self, row: int, start: Extent, size: Extent) -> str:
        return f"tensor {self._tensors.all.name[row]!r}, box {list(start)}+{list(size)}"

    def check_aliases(self, aliases: Mapping[str, str], problems: list[str]) -> set[int]:
        """Return the rows of tensors that are tied to others. Ranks that hold nothing of a tensor can't tell whether it
        is tied: those that do decide, and must agree. So must all about what each keeps for itself."""
        tied: set[int] = set()
        for other, name in aliases.items():
            row = self._tensors.row_of(other)
            untied = self._tensors.owners(other)
            if row is not None:
                tied.add(row)
                if row in self._claimed or row in self._run_of:
                    untied = self._holders(row)
            if untied:
                ties = [part.rank for part in self._parts if other in part.aliases]
                problems.append(
                    f"{other!r} is tied to {name!r} on {ranks_shown(ties)}, and a tensor of its own on "
                    f"{ranks_shown(untied)}; tie it on all ranks that have both, or copy it where it is tied"
                )
        return tied

    def _holders(self, row: int) -> list[int]:
        """The ranks that have a box of a row, or claim one."""
        return [
            part.rank
            for part, rows in zip(self._parts, self._tensors.rows, strict=True)
            if any(rows[at] == row for at in chain(part.boxes.tensor, part.claims.tensor))
        ]

    def table(self, dropped: Collection[int]) -> BoxTable:
        """All boxes in the order of the tensors, then of their starts. No row that is ``dropped`` has any: those that
        follow it move up."""
        rows = self._order.rows
        if dropped:
            moved = list(accumulate([row not in dropped for row in range(len(self._tensors.all.name))], initial=0))
            rows = list(map(moved.__getitem__, rows))
        packs: Iterable[int] = chain.from_iterable(
            map(places.__getitem__, part.boxes.pack) if len(places) > 1 else repeat(places[0], len(part.boxes.pack))
            for part, places in zip(self._parts, self._pack_places, strict=True)
            if part.boxes.pack
        )
        return BoxTable(
            tensor=rows,
            start=self._starts,
            size=self._order.taken(self._size),
            pack=self._order.taken(list(packs)),
            offset=self._order.taken(self._column("offset")),
            digests=self._order.taken(self._digests),
        )


def _ascend(starts: Sequence[Extent]) -> bool:
    return all(map(lt, starts, islice(starts, 1, None)))
