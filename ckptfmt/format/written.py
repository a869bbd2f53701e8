"""The short way to read a manifest or a part: for texts that are, byte for byte, what this library writes.

Nothing can stand twice in such a text, and nothing in it is unknown, because writing its value again gives the same
text. That costs two passes in C, whereas looking for repeated members costs a call for every object. Columns that
most often repeat others stay text until they are compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Final, Literal, TypeVar

import msgspec

from ckptfmt.format.dtypes import DTYPES
from ckptfmt.format.tables import CORNERS, BoxTable, Extent, TensorTable
from ckptfmt.format.trees import Trees, TreeTexts

S = TypeVar("S", bound=msgspec.Struct)


def read(text: bytes, type_: type[S]) -> S | None:
    """Return the value of ``text`` as ``type_``, every member checked by its type.

    None for a text that this library would have written otherwise, or not at all: it may be sound, but has to be
    read member by member.
    """
    try:
        value = msgspec.json.decode(text, type=_raw_type(type_))
        if msgspec.json.encode(value) != text:
            return None
        fields = {name: getattr(value, name) for name in type_.__struct_fields__}
        shapes = extents(value.tensors.shape)
        fields["tensors"] = _table(TensorTable, value.tensors, shape=shapes)
        if "trees" in fields:
            fields["trees"] = TreeTexts(common=value.trees.common, per_rank=value.trees.per_rank)
        fields["boxes"] = _boxes(value.boxes, bytes(value.tensors.shape), shapes)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError, IndexError):
        return None
    return type_(**fields)


def _boxes(raw: Any, shapes_text: bytes, shapes: list[Extent]) -> BoxTable:
    if bytes(raw.size) != shapes_text:
        return _table(BoxTable, raw, size=extents(raw.size), start=extents(raw.start))
    corners = list(map(CORNERS.__getitem__, map(len, shapes)))
    whole = msgspec.json.encode(corners) == bytes(raw.start)
    return _table(BoxTable, raw, size=list(shapes), start=corners if whole else extents(raw.start))


def extents(raw: msgspec.Raw | bytes) -> list[Extent]:
    """Read a column of extents. Layers are alike, so that most of a long column are equal to others: each is read once,
    and all of its rows are one object.

    Raises ``ValueError``, of which msgspec's errors are, for what is no such column.
    """
    text = bytes(raw)
    if text[:2] != b"[[" or text[-2:] != b"]]":
        return msgspec.json.decode(text, type=list[Extent])
    pieces = text[2:-2].split(b"],[")
    distinct = dict.fromkeys(pieces)
    if len(pieces) < _ALIKE * len(distinct):
        return msgspec.json.decode(text, type=list[Extent])
    read = msgspec.json.decode(b"[[%s]]" % b"],[".join(distinct), type=list[Extent])
    extent = dict(zip(distinct, read, strict=True))  # ValueError unless each piece was an extent
    return list(map(extent.__getitem__, pieces))


_ALIKE: Final = 4
"""So many rows have to be equal to one another, on average, before it pays to look for equal ones."""


def _table(type_: type[S], raw: Any, **columns: Any) -> S:
    return type_(**{name: getattr(raw, name) for name in type_.__struct_fields__} | columns)


_RAW_COLUMNS: Final[Mapping[type, Mapping[str, Any]]] = {
    # Given all words beforehand, no string is made for each row.
    TensorTable: {"dtype": list[Literal[*DTYPES]], "shape": msgspec.Raw},  # type: ignore[valid-type]
    BoxTable: {"start": msgspec.Raw, "size": msgspec.Raw},
    Trees: {"common": msgspec.Raw, "per_rank": dict[str, dict[str, msgspec.Raw]]},
}


@cache
def _raw_type(type_: type[msgspec.Struct]) -> Any:
    return with_texts(type_, _RAW_COLUMNS)


def with_texts(type_: type[msgspec.Struct], replaced: Mapping[type, Mapping[str, Any]]) -> Any:
    """Return ``type_`` for texts that this library writes, in which every member stands, in this order.

    ``replaced`` tells as what some members of it, and of the tables in it, are read: type -> member -> its type.
    """
    own = replaced.get(type_, {})
    fields: list[Any] = []
    for field in msgspec.structs.fields(type_):
        kind = own.get(field.name) or (with_texts(field.type, replaced) if field.type in replaced else field.type)
        fields.append((field.name, kind, msgspec.UNSET) if field.default is msgspec.UNSET else (field.name, kind))
    return msgspec.defstruct(type_.__name__, fields, kw_only=True)
