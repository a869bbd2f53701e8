"""Reading the parts of all ranks, which say mostly the same: what stands in one as in the one before, text for text, is
read and checked once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import msgspec

from ckptfmt.format import checksum, tables
from ckptfmt.format.manifest import READ_FEATURES
from ckptfmt.format.part import Part, check_own, decode_part, described
from ckptfmt.format.tables import BoxTable, ClaimTable, Extent, TensorTable
from ckptfmt.format.tree_walk import marks
from ckptfmt.format.trees import Trees, check_references
from ckptfmt.format.verdict import VERSION

_SHARED: Final = ("aliases", "tree")
_COLUMNS: Final = ("name", "kind", "dtype", "shape")
"""Of the tensors: all but their owners."""


@dataclass(frozen=True)
class _Model:
    """A part that has been read and checked whole, and the texts of what others may have in common with it."""

    part: Part
    texts: tuple[bytes, ...]
    own: tuple[int, ...]
    """The rows that belong to the rank."""
    tensor_bytes: list[int]
    names: dict[str, Any]


class PartReader:
    """Reads parts one after the other. Parts share lists and trees where their texts are equal: nobody may change
    them."""

    def __init__(self) -> None:
        self._model: _Model | None = None

    def read(self, stored: bytes) -> Part:
        """Return a part after checking all of it. Errors as of ``decode_part``."""
        raw = _raw(stored)
        if raw is not None and self._model is not None:
            part = _like(raw, self._model)
            if part is not None:
                return part
        part = decode_part(stored)
        self._model = None if raw is None else _model(part, raw)
        return part


def _raw(stored: bytes) -> Any | None:
    """The members of a part that this version may have written, with those in common left as texts."""
    try:
        raw = msgspec.json.decode(stored, type=_raw_part())
        if msgspec.json.encode(raw) != stored:
            return None
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError):
        return None
    known = raw.version <= VERSION and raw.digest_algorithm == checksum.ALGORITHM
    return raw if known and READ_FEATURES.issuperset(raw.read_features) else None


def _texts(raw: Any) -> tuple[bytes, ...]:
    return (
        *(bytes(getattr(raw, name)) for name in _SHARED),
        *(bytes(getattr(raw.tensors, name)) for name in _COLUMNS),
    )


def _model(part: Part, raw: Any) -> _Model:
    return _Model(
        part=part,
        texts=_texts(raw),
        own=tuple([row for row, rank in enumerate(part.tensors.rank) if rank >= 0]),
        tensor_bytes=tables.check_tensors(part.tensors, len(set(part.tensors.name)), described(part)),
        names=dict.fromkeys([*part.tensors.name, *part.aliases]),
    )


def _like(raw: Any, model: _Model) -> Part | None:
    """The part, if it has in common with the model what parts may have in common. Errors for what is its own."""
    of = model.part
    if _texts(raw) != model.texts or raw.per_rank.keys() != of.per_rank.keys() or marks(raw.metadata):
        return None
    owners = [-1] * len(of.tensors.name)
    for row in model.own:
        owners[row] = raw.rank
    if raw.tensors.rank != owners:
        return None
    try:
        start, size = (msgspec.json.decode(text, type=list[Extent]) for text in (raw.boxes.start, raw.boxes.size))
    except msgspec.MsgspecError:
        return None
    tensors = TensorTable(of.tensors.name, of.tensors.kind, owners, of.tensors.dtype, of.tensors.shape)
    boxes = BoxTable(raw.boxes.tensor, start, size, raw.boxes.pack, raw.boxes.offset, raw.boxes.digests)
    claims = ClaimTable(raw.claims.tensor, raw.claims.start, raw.claims.size, raw.claims.digests)
    fields = {name: getattr(raw, name) for name in Part.__struct_fields__}
    fields |= {name: getattr(of, name) for name in _SHARED}
    part = Part(**fields | {"tensors": tensors, "boxes": boxes, "claims": claims})
    what = described(part)
    tables.check_packs(part.packs, what)
    check_own(part, model.tensor_bytes, what)
    check_references(Trees(per_rank={str(part.rank): part.per_rank}), model.names, what)
    return part


@cache
def _raw_part() -> Any:
    """``Part`` with its members in their order, those in common as texts."""
    as_text = {
        TensorTable: dict.fromkeys(_COLUMNS, msgspec.Raw),
        BoxTable: {"start": msgspec.Raw, "size": msgspec.Raw},
        Part: dict.fromkeys(_SHARED, msgspec.Raw),
    }

    def partly(type_: type[msgspec.Struct]) -> Any:
        texts = as_text[type_]
        fields: list[Any] = []
        for field in msgspec.structs.fields(type_):
            kind = texts.get(field.name) or (partly(field.type) if field.type in as_text else field.type)
            fields.append((field.name, kind, msgspec.UNSET) if field.default is msgspec.UNSET else (field.name, kind))
        return msgspec.defstruct(type_.__name__, fields, kw_only=True)

    return partly(Part)
