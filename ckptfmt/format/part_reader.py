"""Reading the parts of all ranks, which say mostly the same: what stands in one as in the one before, text for text, is
read and checked once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import chain
from operator import le, sub
from typing import Any, Final

import msgspec

from ckptfmt.format import checksum, tables, written
from ckptfmt.format.manifest import READ_FEATURES
from ckptfmt.format.part import PART_BYTES_MAX, Part, check_own, decode_part, described
from ckptfmt.format.tables import BoxTable, ClaimTable, TensorTable
from ckptfmt.format.tree_walk import marks
from ckptfmt.format.trees import Trees, check_references
from ckptfmt.format.verdict import VERSION

_TABLES: Final[dict[str, type[msgspec.Struct]]] = {"tensors": TensorTable, "boxes": BoxTable, "claims": ClaimTable}
_TEXTS: Final = ("aliases", "tree")
"""Members besides tables that are read as texts."""
_EQUAL: Final = (*_TEXTS, "tensors.name", "tensors.kind", "tensors.dtype", "tensors.shape")
"""What has to be as it was in another part, for anything of that to be used."""
_LAYOUT: Final = ("boxes.tensor", "boxes.size", "boxes.pack", "boxes.offset")
"""What is equal, besides, where each rank has an equal share of every tensor."""


@dataclass(frozen=True)
class _Model:
    """A part that has been read and checked whole, and the texts of what others may have in common with it."""

    part: Part
    texts: dict[str, bytes]
    values: dict[str, Any]
    """The columns, by the same names."""
    own: tuple[int, ...]
    """The tensors that belong to the rank."""
    tensor_bytes: list[int]
    names: dict[str, Any]
    limits: list[int]
    """The greatest starts that keep the boxes within their tensors, one dimension after the other."""


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
    """The members of a part that this version may have written, columns and what is in common left as texts.

    Members that stand twice, or are unknown, would be gone in the same text written again; a column has no members.
    """
    if len(stored) > PART_BYTES_MAX:
        return None
    try:
        raw = msgspec.json.decode(stored, type=_raw_part())
        if msgspec.json.encode(raw) != stored:
            return None
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError):
        return None
    known = raw.version <= VERSION and raw.digest_algorithm == checksum.ALGORITHM
    return raw if known and READ_FEATURES.issuperset(raw.read_features) else None


def _texts(raw: Any) -> dict[str, bytes]:
    found = {name: bytes(getattr(raw, name)) for name in _TEXTS}
    for table, type_ in _TABLES.items():
        of = getattr(raw, table)
        found |= {f"{table}.{column}": bytes(getattr(of, column)) for column in type_.__struct_fields__}
    return found


def _model(part: Part, raw: Any) -> _Model:
    shapes = map(part.tensors.shape.__getitem__, part.boxes.tensor)
    return _Model(
        part=part,
        texts=_texts(raw),
        values={
            f"{table}.{column}": getattr(getattr(part, table), column)
            for table, type_ in _TABLES.items()
            for column in type_.__struct_fields__
        },
        own=tuple([row for row, rank in enumerate(part.tensors.rank) if rank >= 0]),
        tensor_bytes=tables.check_tensors(part.tensors, len(set(part.tensors.name)), described(part)),
        names=dict.fromkeys([*part.tensors.name, *part.aliases]),
        limits=list(map(sub, chain.from_iterable(shapes), chain.from_iterable(part.boxes.size))),
    )


def _like(raw: Any, model: _Model) -> Part | None:
    """The part, if it has in common with the model what parts may have in common. Errors for what is its own."""
    texts, of = _texts(raw), model.part
    if any(texts[name] != model.texts[name] for name in _EQUAL):
        return None
    if raw.per_rank.keys() != of.per_rank.keys() or marks(raw.metadata):
        return None
    try:
        values = {
            name: model.values[name] if text == model.texts[name] else _column(name, text)
            for name, text in texts.items()
            if name not in _TEXTS
        }
    except (msgspec.MsgspecError, ValueError):
        return None
    owners = [-1] * len(of.tensors.name)
    for row in model.own:
        owners[row] = raw.rank
    if values["tensors.rank"] != owners:
        return None
    fields = {name: getattr(raw, name) for name in Part.__struct_fields__} | {
        name: getattr(of, name) for name in _TEXTS
    }
    for table, type_ in _TABLES.items():
        fields[table] = type_(*(values[f"{table}.{column}"] for column in type_.__struct_fields__))
    part = Part(**fields)
    what = described(part)
    tables.check_packs(part.packs, what)
    if not _is_alike(part, model, all(texts[name] == model.texts[name] for name in _LAYOUT)):
        check_own(part, model.tensor_bytes, what)
    check_references(Trees(per_rank={str(part.rank): part.per_rank}), model.names, what)
    return part


def _is_alike(part: Part, model: _Model, laid_out_alike: bool) -> bool:
    """Whether a part without claims whose boxes are as large as the model's, and lie where those lie in packs of the
    same sizes, is sound. False also where that can't be told."""
    of = model.part
    if not laid_out_alike or part.claims != ClaimTable() or of.claims.tensor or part.world_size != of.world_size:
        return False
    packs = [(pack.nbytes, pack.header_bytes, pack.rank, pack.generation) for pack in part.packs]
    if (
        packs != [(pack.nbytes, pack.header_bytes, part.rank, None) for pack in of.packs]
        or part.rank >= part.world_size
    ):
        return False
    if part.chunk_bytes != of.chunk_bytes or any(pack.generation is not None for pack in of.packs):
        return False
    boxes, known = part.boxes, of.boxes
    if list(map(len, boxes.start)) != list(map(len, known.start)):
        return False
    if list(map(len, boxes.digests)) != list(map(len, known.digests)):
        return False
    if not all(map(le, chain.from_iterable(boxes.start), model.limits)):
        return False
    return not "".join(boxes.digests).encode("utf-8").translate(None, b"0123456789abcdef")


def _column(name: str, text: bytes) -> Any:
    if name.endswith((".start", ".size")):
        return written.extents(text)
    return _decoder(name).decode(text)


@cache
def _decoder(column: str) -> msgspec.json.Decoder[Any]:
    table, _, name = column.partition(".")
    types = {field.name: field.type for field in msgspec.structs.fields(_TABLES[table])}
    return msgspec.json.Decoder(types[name])


@cache
def _raw_part() -> Any:
    """``Part`` with what parts have in common, and all columns, left as texts."""
    columns = {type_: dict.fromkeys(type_.__struct_fields__, msgspec.Raw) for type_ in _TABLES.values()}
    return written.with_texts(Part, {Part: dict.fromkeys(_TEXTS, msgspec.Raw), **columns})
