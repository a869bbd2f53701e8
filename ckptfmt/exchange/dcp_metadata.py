"""What a torch.distributed.checkpoint directory holds, from its ``.metadata``.

That file is a pickle, the only one that is read anywhere in ckptfmt. Nothing in it is trusted: every name that it asks
for has to be on the list below and gets a fresh, empty stand-in class, so that neither torch nor anything else is
imported or called, and what was built is then checked as any other parsed value. ``FormatError`` for everything else.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from ckptfmt.errors import FormatError
from ckptfmt.format.boxes import Box, Extent, check_tiling
from ckptfmt.format.dtypes import DTYPES

METADATA_BYTES_MAX: Final = 512 << 20
CHUNKS_MAX: Final = 10_000_000
"""More boxes than any save has: a pickle can refer to one list from many tensors."""
_DEPTH_MAX: Final = 200
_METADATA: Final = "torch.distributed.checkpoint.metadata"
_FILESYSTEM: Final = "torch.distributed.checkpoint.filesystem"
ALLOWED: Final[Mapping[str, frozenset[str]]] = {
    _METADATA: frozenset(
        {
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        }
    ),
    _FILESYSTEM: frozenset({"_StorageInfo"}),
    "torch.serialization": frozenset({"_get_layout"}),
    "torch": frozenset({"Size", *DTYPES}),
    "collections": frozenset({"OrderedDict"}),
    "pathlib": frozenset({"PosixPath", "PurePosixPath", "WindowsPath"}),
    "pathlib._local": frozenset({"PosixPath", "PurePosixPath", "WindowsPath"}),
}
"""What torch's own writers name, by module."""


@dataclass(frozen=True)
class Item:
    """A range of bytes in a file beside the metadata: what torch.save wrote of one box, or of one value."""

    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class DcpTensor:
    """``boxes`` tile ``shape``; each lies in the item at its place in ``items``."""

    dtype: str
    shape: Extent
    boxes: tuple[Box, ...]
    items: tuple[Item, ...]


@dataclass(frozen=True)
class DcpMetadata:
    """``paths`` has the place in the nested state for each name that the planner told one of."""

    tensors: Mapping[str, DcpTensor]
    values: Mapping[str, Item]
    paths: Mapping[str, tuple[str | int, ...]]


def parse_metadata(data: bytes, what: str) -> DcpMetadata:
    """Read the bytes of a ``.metadata``. ``FormatError`` naming ``what``, and what of it is wrong."""
    if len(data) > METADATA_BYTES_MAX:
        raise FormatError(f"{what} has {len(data)} bytes; {METADATA_BYTES_MAX} is the most that is read")
    try:
        root = _Unpickler(io.BytesIO(data)).load()
        return _Reader().read(root)
    except FormatError as error:
        raise FormatError(f"{what}: {error}") from None
    except RecursionError:
        raise FormatError(f"{what} is nested too deeply") from None
    except Exception as error:  # a pickle machine that is given nonsense ends in any of them
        raise FormatError(f"{what} is not the metadata of a DCP directory: {type(error).__name__}: {error}") from None


# -- the pickle machine -----------------------------------------------------------------------------
class _Named:
    """An instance of something that the pickle names: what it was called with, and its state."""

    full_name = ""

    def __new__(cls, *args: Any) -> _Named:
        made = object.__new__(cls)
        object.__setattr__(made, "args", args)
        object.__setattr__(made, "state", {})
        return made

    args: tuple[Any, ...]
    state: Any

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        object.__setattr__(self, "state", state)


# The machine that is written in Python: the one in C sets memory aside for whatever number a file claims to remember.
class _Unpickler(pickle._Unpickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._made: dict[str, type] = {}

    def find_class(self, module: str, name: str) -> type:
        if name not in ALLOWED.get(module, ()):
            raise FormatError(
                f"it names {module}.{name}, which torch's own writers do not; nothing is run to find out what it is: "
                "load it with the tool that wrote it, and save the state with ckptfmt.save"
            )
        full_name = f"{module}.{name}"
        made = self._made.get(full_name)
        if made is None:  # for this file alone: a pickle may set attributes of what it has named
            base: type = dict if name == "OrderedDict" else _Named
            made = self._made[full_name] = type(name, (base,), {"full_name": full_name})
        return made

    def persistent_load(self, pid: Any) -> NoReturn:
        raise FormatError("it refers to objects outside of itself")

    def get_extension(self, code: int) -> NoReturn:
        raise FormatError(f"it names an extension, number {code}")


# -- from what was built to what is meant -------------------------------------------------------------
class _Reader:
    def __init__(self) -> None:
        self._chunks = 0

    def read(self, root: Any) -> DcpMetadata:
        fields = _fields(root, f"{_METADATA}.Metadata")
        items = self._items(fields.get("storage_data"))
        tensors: dict[str, DcpTensor] = {}
        values: dict[str, Item] = {}
        for name, entry in _dict(fields.get("state_dict_metadata"), "state_dict_metadata").items():
            _text(name, "a name")
            if _is(entry, f"{_METADATA}.BytesStorageMetadata"):
                values[name] = _item(items, name, None)
            else:
                tensors[name] = self._tensor(name, entry, items)
        return DcpMetadata(tensors, values, _paths(fields.get("planner_data")))

    def _items(self, storage: Any) -> dict[tuple[str, Extent | None], Item]:
        found: dict[tuple[str, Extent | None], Item] = {}
        for index, info in _dict(storage, "storage_data").items():
            place = _fields(index, f"{_METADATA}.MetadataIndex")
            where = _fields(info, f"{_FILESYSTEM}._StorageInfo")
            offset = place.get("offset")
            key = _text(place.get("fqn"), "a name"), None if offset is None else _extent(offset)
            if where.get("transform_descriptors"):
                raise FormatError(
                    f"{key[0]!r} was written through {where['transform_descriptors']!r}, not as plain bytes"
                )
            item = Item(
                _text(where.get("relative_path"), "a file name"),
                _count(where.get("offset"), "an offset"),
                _count(where.get("length"), "a length"),
            )
            if found.setdefault(key, item) != item:
                raise FormatError(f"{key[0]!r} has two places for one box")
        return found

    def _tensor(self, name: str, entry: Any, items: Mapping[tuple[str, Extent | None], Item]) -> DcpTensor:
        fields = _fields(entry, f"{_METADATA}.TensorStorageMetadata")
        shape = _extent(fields.get("size"))
        chunks = fields.get("chunks")
        if not isinstance(chunks, list):
            raise FormatError(f"{name!r} has no list of chunks")
        self._chunks += len(chunks)
        if self._chunks > CHUNKS_MAX:
            raise FormatError(f"it tells of more than {CHUNKS_MAX} chunks")
        boxes: dict[Box, Item] = {}
        for chunk in chunks:
            parts = _fields(chunk, f"{_METADATA}.ChunkStorageMetadata")
            start, size = _extent(parts.get("offsets")), _extent(parts.get("sizes"))
            boxes[start, size] = _item(items, name, start)
        reason = check_tiling(shape, list(boxes)).reason
        if reason is not None:
            raise FormatError(f"tensor {name!r} is not whole: {reason}")
        return DcpTensor(_dtype(name, fields.get("properties")), shape, tuple(boxes), tuple(boxes.values()))


def _is(value: Any, full_name: str) -> bool:
    return isinstance(value, _Named) and value.full_name == full_name


def _fields(value: Any, full_name: str) -> Mapping[str, Any]:
    if not _is(value, full_name) or not isinstance(value.state, dict):
        raise FormatError(f"a {full_name} was expected, and {_shown(value)} is there")
    return value.state


def _shown(value: Any) -> str:
    return value.full_name if isinstance(value, _Named) else type(value).__name__


def _dict(value: Any, what: str) -> Mapping[Any, Any]:
    if not isinstance(value, dict):
        raise FormatError(f"its {what} is no dict")
    return value


def _text(value: Any, what: str) -> str:
    if type(value) is not str:
        raise FormatError(f"{what} is no text")
    if not value.isprintable():
        value.encode("utf-8")  # a lone surrogate could not be written anywhere
    return value


def _count(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise FormatError(f"{what} is no number of bytes")
    return value


def _extent(value: Any) -> Extent:
    """A ``torch.Size``, or the tuple or list that stands for one."""
    if _is(value, "torch.Size") and len(value.args) <= 1:
        value = value.args[0] if value.args else ()
    if not isinstance(value, tuple | list) or not all(type(n) is int and 0 <= n < 1 << 63 for n in value):
        raise FormatError("a shape is not made of whole numbers")
    return tuple(value)


def _item(items: Mapping[tuple[str, Extent | None], Item], name: str, start: Extent | None) -> Item:
    found = items.get((name, start))
    if found is None:
        found = items.get((name, None))
    if found is None:
        where = "" if start is None else f" at {list(start)}"
        raise FormatError(f"it does not tell in which file {name!r}{where} lies")
    return found


def _dtype(name: str, properties: Any) -> str:
    """The first word that the state of ``TensorProperties`` has: its dtype."""
    if not _is(properties, f"{_METADATA}.TensorProperties"):
        raise FormatError(f"tensor {name!r} has no properties")
    state = properties.state
    found = state.get("dtype") if isinstance(state, dict) else state[0]
    word = getattr(found, "full_name", "").removeprefix("torch.")
    if word not in DTYPES:
        raise FormatError(f"tensor {name!r} has an element type that cannot be read: {_shown(found)}")
    return word


def _is_key(key: Any) -> bool:
    return type(key) in (str, int)


def _paths(planner_data: Any) -> dict[str, tuple[str | int, ...]]:
    """Planners of others keep what they like there: then names are all that is known."""
    if not isinstance(planner_data, dict):
        return {}
    return {
        name: path
        for name, path in planner_data.items()
        if type(name) is str and type(path) is tuple and 0 < len(path) <= _DEPTH_MAX and all(map(_is_key, path))
    }
