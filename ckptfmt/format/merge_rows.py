"""The tensors of several parts as one table. Ranks hold shares of the same tensors, so most of it is comparing."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property

from ckptfmt.format.naming import ranks_shown
from ckptfmt.format.part import Part
from ckptfmt.format.tables import TensorTable


class TensorUnion:
    """The tensors of ``parts`` (by rank) in the order in which they appear.

    ``rows[i]`` tells for each row of part i's table which row of the union it is. Disagreement about a tensor is added
    to ``problems``.
    """

    def __init__(self, parts: Sequence[Part], problems: list[str]) -> None:
        self._parts = parts
        self.all = TensorTable()
        self._first_rank: list[int] = []
        self._place: dict[tuple[str, int], int] = {}
        self._listed: list[int] = []
        """How many parts list each row."""
        first = parts[0].tensors
        common = self._add_all(parts[0], problems)
        own = [i for i, kind in enumerate(first.kind) if kind == "per_rank"]
        self.rows: list[Sequence[int]] = [common]
        alike = 0
        for part in parts[1:]:
            if not _are_alike(part.tensors, first):
                self.rows.append(self._add_all(part, problems))
                continue
            alike += 1
            rows = common
            if own:
                rows = list(common)
                for i in own:
                    rows[i] = self._add(part, i, problems)
            self.rows.append(rows)
        for row in set(common).difference(map(common.__getitem__, own)):
            self._listed[row] += alike

    def _add_all(self, part: Part, problems: list[str]) -> list[int]:
        return [self._add(part, i, problems) for i in range(len(part.tensors.name))]

    def _add(self, part: Part, i: int, problems: list[str]) -> int:
        known, table = self.all, part.tensors
        name, rank = table.name[i], table.rank[i]
        row = self._place.setdefault((name, rank), len(known.name))
        if row == len(known.name):
            known.name.append(name)
            known.kind.append(table.kind[i])
            known.rank.append(rank)
            known.dtype.append(table.dtype[i])
            known.shape.append(table.shape[i])
            self._first_rank.append(part.rank)
            self._listed.append(0)
        else:
            seen = (known.kind[row], known.dtype[row], known.shape[row])
            new = (table.kind[i], table.dtype[i], table.shape[i])
            if seen != new:
                texts = [f"{kind} {dtype} {list(shape)}" for kind, dtype, shape in (seen, new)]
                problems.append(
                    f"tensor {name!r} is {texts[0]} on rank {self._first_rank[row]}, but {texts[1]} on rank {part.rank}"
                )
        self._listed[row] += 1
        return row

    def row_of(self, name: str) -> int | None:
        """The row of a tensor that is common to all ranks."""
        return self._place.get((name, -1))

    def owners(self, name: str) -> Sequence[int]:
        """The ranks that keep a tensor of this name for themselves."""
        return self._owners.get(name, ())

    @cached_property
    def _owners(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for name, rank in self._place:
            if rank >= 0:
                found.setdefault(name, []).append(rank)
        return found

    def check_owners(self, problems: list[str]) -> None:
        """What some rank keeps for itself no other may have as a tensor that is common to all."""
        for name in self._owners:
            row = self.row_of(name)
            if row is not None:
                problems.append(
                    f"tensor {name!r} is {self.all.kind[row]} on rank {self._first_rank[row]}, but kept for itself by "
                    f"{ranks_shown(self.owners(name))}; all ranks have to put it into ckptfmt.PerRank, or none"
                )

    def lacking(self, row: int) -> list[int]:
        """The ranks whose parts do not list a row."""
        return [part.rank for part, rows in zip(self._parts, self._sets, strict=True) if row not in rows]

    @cached_property
    def _sets(self) -> list[frozenset[int]]:
        return list(map(frozenset, self.rows))

    def check_replicated(self, dropped: Collection[int], problems: list[str]) -> None:
        """Every rank must have what is replicated: nobody could tell a rank's own tensor from one that others lost."""
        for row, kind in enumerate(self.all.kind):
            if kind == "replicated" and self._listed[row] < len(self._parts) and row not in dropped:
                problems.append(
                    f"tensor {self.all.name[row]!r} is in the state of rank {self._first_rank[row]}, but not in that "
                    f"of {ranks_shown(self.lacking(row))}; a plain tensor is one that every rank has: "
                    "put what only some have into ckptfmt.Sharded, or what each keeps for itself into ckptfmt.PerRank"
                )

    def table(self, dropped: Collection[int]) -> TensorTable:
        """All rows but the ``dropped`` ones."""
        if not dropped:
            return self.all
        kept = [row for row in range(len(self.all.name)) if row not in dropped]
        return TensorTable(
            name=[self.all.name[row] for row in kept],
            kind=[self.all.kind[row] for row in kept],
            rank=[self.all.rank[row] for row in kept],
            dtype=[self.all.dtype[row] for row in kept],
            shape=[self.all.shape[row] for row in kept],
        )


def _are_alike(table: TensorTable, first: TensorTable) -> bool:
    """Whether two parts list the same tensors, the owners of per-rank ones aside."""
    columns = ("name", "kind", "dtype", "shape")
    pairs = [(getattr(table, column), getattr(first, column)) for column in columns]
    return all(mine is its or mine == its for mine, its in pairs)
