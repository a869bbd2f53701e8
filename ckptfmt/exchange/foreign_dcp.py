"""Directories of torch.distributed.checkpoint: what is in them without torch, their bytes with it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from ckptfmt.errors import Corrupt, FormatError
from ckptfmt.exchange.dcp_metadata import METADATA_BYTES_MAX, DcpMetadata, DcpTensor, Item, parse_metadata
from ckptfmt.exchange.foreign import Foreign
from ckptfmt.exchange.foreign_torch import require_torch
from ckptfmt.exchange.local_file import LocalFile, plain_name
from ckptfmt.exchange.pieces import SourceBox, SourceTensor
from ckptfmt.format.boxes import Extent

METADATA: Final = ".metadata"
KEPT_BYTES: Final = 256 << 20
"""Of items that were read: a tensor in several boxes is asked for row by row. One larger item is kept alone."""


class _Items:
    """Reads items whole, since torch wrote each as an archive of its own, and keeps the last ones."""

    def __init__(self, path: Path, files: Mapping[str, LocalFile]) -> None:
        self._path = path
        self._files = files
        self._lock = threading.Lock()
        self._kept: OrderedDict[Item, tuple[str, Extent, memoryview]] = OrderedDict()

    def data(self, item: Item) -> bytes:
        return self._files[item.file].read(item.offset, item.nbytes)

    def what(self, name: str, item: Item) -> str:
        return f"{self._path}: {name!r} in {item.file} at offset {item.offset}"

    def box(self, name: str, item: Item) -> tuple[str, Extent, memoryview]:
        """Element type, shape and bytes of what an item holds."""
        from ckptfmt.torch.weights_only import box_in

        with self._lock:
            found = self._kept.get(item)
            if found is None:
                found = self._kept[item] = box_in(self.data(item), self.what(name, item))
                while len(self._kept) > 1 and sum(one[2].nbytes for one in self._kept.values()) > KEPT_BYTES:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(item)
            return found


class _ItemBytes:
    """The bytes of one box."""

    __slots__ = ("_dtype", "_item", "_items", "_name", "_size")

    def __init__(self, items: _Items, name: str, dtype: str, size: Extent, item: Item) -> None:
        self._items = items
        self._name = name
        self._dtype = dtype
        self._size = size
        self._item = item

    def read_into(self, first: int, memory: memoryview) -> None:
        require_torch(f"tensor {self._name!r} of a DCP directory")
        dtype, size, data = self._items.box(self._name, self._item)
        if (dtype, size) != (self._dtype, self._size):
            raise Corrupt(
                f"{self._items.what(self._name, self._item)} is {dtype} {list(size)}; the metadata tells "
                f"{self._dtype} {list(self._size)}",
                object=self._item.file,
                tensor=self._name,
                offset=self._item.offset,
            )
        memory[:] = data[first : first + memory.nbytes]


class DcpDirectory(Foreign):
    """``values`` are read with torch, and only when they are asked for."""

    def __init__(self, path: Path, metadata: DcpMetadata, files: Mapping[str, LocalFile]) -> None:
        self._dcp = metadata
        self._items = _Items(path, files)
        tensors = {name: self._tensor(name, found) for name, found in metadata.tensors.items()}
        super().__init__("dcp", path, tensors, list(files.values()), values=tuple(metadata.values))

    def _tensor(self, name: str, found: DcpTensor) -> SourceTensor:
        boxes = tuple(
            SourceBox(start, size, _ItemBytes(self._items, name, found.dtype, size, item))
            for (start, size), item in zip(found.boxes, found.items, strict=True)
        )
        return SourceTensor(name, found.dtype, found.shape, boxes, found.items[0].file)

    @cached_property
    def _loaded(self) -> dict[str, Any]:
        if not self._dcp.values:
            return {}
        require_torch(f"{self.path}: what is no tensor in a DCP directory")
        from ckptfmt.torch.weights_only import load_bytes

        return {
            name: load_bytes(self._items.data(item), self._items.what(name, item))
            for name, item in self._dcp.values.items()
        }

    def value_texts(self) -> dict[str, str]:
        return {name: repr(value) for name, value in self._loaded.items()}

    def state(self) -> Any:
        """Nested as the saved state was, where the planner told the paths; else flat."""
        flat = {**self.tensors, **self._loaded}
        paths = self._dcp.paths
        return nested({paths[name]: value for name, value in flat.items()}) if flat.keys() <= paths.keys() else flat


def open_dcp(path: Path) -> Foreign:
    """``FormatError`` and ``Corrupt`` for metadata that cannot be trusted, and for files shorter than it tells."""
    metadata_file = LocalFile(path / METADATA)
    files = {METADATA: metadata_file}
    try:
        if metadata_file.nbytes > METADATA_BYTES_MAX:
            raise FormatError(f"{metadata_file.path} has {metadata_file.nbytes} bytes, more than any metadata")
        metadata = parse_metadata(metadata_file.read(0, metadata_file.nbytes), str(metadata_file.path))
        for name, item in _all_items(metadata):
            _require_there(path, name, item, files)
        return DcpDirectory(path, metadata, files)
    except BaseException:
        for file in files.values():
            file.close()
        raise


def _all_items(metadata: DcpMetadata) -> list[tuple[str, Item]]:
    items = [(name, item) for name, found in metadata.tensors.items() for item in found.items]
    return items + list(metadata.values.items())


def _require_there(path: Path, name: str, item: Item, files: dict[str, LocalFile]) -> None:
    if item.file not in files:
        files[item.file] = LocalFile(path / plain_name(item.file))
    there = files[item.file].nbytes
    if item.offset + item.nbytes > there:
        raise Corrupt(
            f"{path}: {name!r} ends at {item.offset + item.nbytes} of {item.file}, which has {there} bytes: it is "
            "cut short, or of another save",
            kind="truncated",
            object=item.file,
            tensor=name,
            offset=item.offset,
        )


def nested(flat: Mapping[tuple[str | int, ...], Any]) -> Any:
    """Put values back at their paths: lists where the keys are all numbers without a gap, else dicts.

    ``FormatError`` if one stands where others stand below it."""
    groups: dict[str | int, dict[tuple[str | int, ...], Any]] = {}
    if list(flat) == [()]:
        return flat[()]
    for path, value in flat.items():
        if not path:
            raise FormatError("a value stands where others stand below it")
        groups.setdefault(path[0], {})[path[1:]] = value
    if groups.keys() == set(range(len(groups))):
        return [nested(groups[number]) for number in range(len(groups))]
    return {key: nested(group) for key, group in groups.items()}
