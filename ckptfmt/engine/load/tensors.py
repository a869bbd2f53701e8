"""What live tensors take from stored ones, before anything is touched."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from ckptfmt.engine.families import Families
from ckptfmt.engine.load.decisions import Fill, RestorePlan
from ckptfmt.engine.load.nodes import describe, tensor_name
from ckptfmt.engine.load.ranks import RankView
from ckptfmt.engine.load.ties import Ties, same_bytes
from ckptfmt.engine.stored import Stored
from ckptfmt.errors import UnsupportedValue
from ckptfmt.format import tree
from ckptfmt.leaves import Sharded
from ckptfmt.ports.arrays import ArrayFamily, LeafSpec

Parts = Sequence[tuple[Any, LeafSpec]]
"""The boxes of one live tensor that lie on this rank: the tensor itself, for an ordinary one."""


class TensorMatcher:
    """Adds to a plan how each live tensor is filled, or why it can't be."""

    def __init__(self, view: RankView, families: Families, plan: RestorePlan, *, cast: bool) -> None:
        self._view = view
        self._families = families
        self._plan = plan
        self._cast = cast
        self._ties = Ties()

    @property
    def at_address(self) -> dict[int, Fill]:
        """The first fill of those that begin at one address."""
        return self._ties.at_address

    def match(self, node: tree.Node, live: Any, path: str, box: Sharded | None) -> None:
        """Fill ``live``, or the ``box`` whose local tensor it is, with what the saved ``node`` refers to."""
        name, family = tensor_name(node), self._families.of(live)
        if name is None or family is None:
            return self._plan.problems.append(f"{path}: a tensor here, but saved was {describe(node)}")
        row = self._view.opened.stored.find(name, self._view.rank)
        parts = self._parts(family, live, path, box)
        if parts is not None and self._fit(row, family, parts, path):
            self.add(path, [(_fill(row, family, part, path), part[1].alias) for part in parts])
        return None

    def build(self, made: Mapping[str, Any]) -> None:
        """Fill the tensors that were made for an object, each with what the name refers to."""
        for name, value in made.items():
            row = self._view.opened.stored.find(name, self._view.rank)
            family = self._families.of(value)
            parts = None if family is None else self._parts(family, value, name, None)
            if family is not None and parts is not None and self._fit(row, family, parts, name):
                self._plan.builds += [_fill(row, family, part, name) for part in parts]

    def add(self, path: str, fills: Sequence[tuple[Fill, Hashable | None]]) -> None:
        """Add what fills one live tensor; one of two that share memory is filled."""
        plan = self._plan
        for fill, alias in fills:
            first = self._ties.first(fill, alias)
            if first is fill:
                plan.fills.append(fill)
            elif not same_bytes(first, fill):
                plan.problems.append(
                    f"{first.path} and {path}: one tensor here, but saved were two that differ; untie them, or leave "
                    "one out with keys="
                )
                return
        plan.loaded.append(path)
        if fills[0][0].cast:
            plan.cast.append(path)

    def _parts(self, family: ArrayFamily, live: Any, path: str, box: Sharded | None) -> Parts | None:
        try:
            found = family.boxes(live, path) if box is None else None
        except UnsupportedValue as error:
            self._plan.problems.append(str(error))
            return None
        locals_ = [live] if found is None else [local for local, _ in found]
        reason = next(filter(None, (family.check_fillable(local, path) for local in locals_)), None)
        if reason is not None:
            self._plan.problems.append(reason)
            return None
        if found is not None:
            return found
        spec = family.describe(live, path)
        if box is not None:
            spec = replace(spec, global_shape=tuple(box.global_shape), start=tuple(box.offsets))
        return [(live, spec)]

    def _fit(self, row: Stored, family: ArrayFamily, parts: Parts, path: str) -> bool:
        spec = parts[0][1]
        if spec.global_shape != row.shape:
            self._plan.problems.append(f"{path}: saved shape {list(row.shape)}, live shape {list(spec.global_shape)}")
            return False
        if spec.dtype != row.dtype and not self._cast:
            self._plan.problems.append(f"{path}: saved dtype {row.dtype}, live dtype {spec.dtype} (cast=True converts)")
            return False
        reason = family.check_cast(parts[0][0], row.dtype) if spec.dtype != row.dtype and row.nbytes else None
        if reason is not None:
            self._plan.problems.append(f"{path}: {reason}")
        return reason is None


def _fill(row: Stored, family: ArrayFamily, part: tuple[Any, LeafSpec], path: str) -> Fill:
    value, spec = part
    return Fill(path, value, family, row, spec.start, spec.size, spec.dtype != row.dtype, spec.address)
