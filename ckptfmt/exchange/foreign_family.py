"""Tensors of foreign checkpoints as an array family, so that an import is an ordinary save: bytes go from the file into
the arena piece by piece, and nobody holds a whole checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from ckptfmt.engine.numpy_family import Done
from ckptfmt.errors import InvalidInput
from ckptfmt.exchange.pieces import SourceArray, SourceBox, SourceTensor
from ckptfmt.format.boxes import volume
from ckptfmt.ports.arrays import ArrayFamily, Capture, Expansion, LeafKind, LeafSpec


class _Piece:
    """Bytes from ``first`` on of a box."""

    __slots__ = ("box", "first")

    def __init__(self, box: SourceBox, first: int) -> None:
        self.box = box
        self.first = first


class SourceFamily:
    """Saves ``SourceTensor`` as torch's tensors (``tensor``), or ``SourceArray`` as numpy's (``array``): read back,
    they are of that library. Nothing is ever filled or built here."""

    def __init__(self, name: str, kind: type[SourceTensor]) -> None:
        self.name = name
        self._kind = kind

    def owns(self, value: Any) -> bool:
        return type(value) is self._kind

    def owns_object(self, value: Any) -> bool:
        return False

    def expand(self, objects: Sequence[tuple[str, Any]], leaves: Sequence[tuple[str, Any]]) -> list[Expansion]:
        return []

    def describe(self, value: Any, path: str, known: LeafSpec | None = None) -> LeafSpec:
        raise AssertionError(f"{path}: a tensor of a file has boxes")

    def boxes(self, value: Any, path: str) -> Sequence[tuple[Any, LeafSpec]] | None:
        if len(value.boxes) == 1:  # of tied tensors it is the same one
            (box,) = value.boxes
            return [(box, _spec(value, box, "replicated", id(box)))]
        return [(box, _spec(value, box, "sharded", None)) for box in value.boxes]

    def coordinates(self, value: Any) -> Mapping[str, int]:
        return {}

    def host_address(self, value: Any) -> int | None:
        return None

    def capture(self, pairs: Sequence[tuple[Any, memoryview]]) -> Capture:
        for value, host in pairs:
            if isinstance(value, _Piece):
                value.box.source.read_into(value.first, host)
            else:
                value.source.read_into(0, host)
        return Done()

    def piece(self, value: Any, start: int, stop: int) -> Any:
        return _Piece(value, start)

    def wrote_to(self, values: Sequence[Any]) -> None:
        _refuse()

    def fill(self, pairs: Sequence[tuple[Any, memoryview]]) -> Capture:
        _refuse()

    def fill_cast(self, value: Any, saved_dtype: str, host: memoryview) -> None:
        _refuse()

    def check_cast(self, value: Any, saved_dtype: str) -> str | None:
        return "a tensor in a file is not written to"

    def check_fillable(self, value: Any, path: str) -> str | None:
        return f"{path}: a tensor in a file is not written to"

    def takes(self, value: Any, dtype: str, shape: tuple[int, ...]) -> int | None:
        return None

    def build(self, spec: LeafSpec, host: memoryview, flags: Sequence[str], device: Any | None) -> Any:
        _refuse()

    def pin(self, memory: memoryview) -> Callable[[], None]:
        return lambda: None


def _spec(value: SourceTensor, box: SourceBox, kind: LeafKind, alias: int | None) -> LeafSpec:
    return LeafSpec(value.dtype, value.shape, box.start, box.size, volume(box.size) * value.itemsize, kind, alias)


def _refuse() -> NoReturn:
    raise InvalidInput("tensors in files of other tools are only read")


def source_families() -> list[ArrayFamily]:
    """One for each library that tensors of files come back as."""
    return [SourceFamily("tensor", SourceTensor), SourceFamily("array", SourceArray)]
