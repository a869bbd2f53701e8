"""Packs: what goes where in a safetensors file, and reading such a header back without trust.

The layout of a safetensors file is 8 bytes of header length (little-endian), a JSON object, and the
entries' bytes back to back without holes (https://github.com/huggingface/safetensors#format).
Offsets here are absolute, in bytes from the start of the file. See spec/format-v1.md, "Packs".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import msgspec

from ckptfmt.errors import Corrupt, FormatError, InvalidInput
from ckptfmt.format import checksum, strict_json
from ckptfmt.format.dtypes import DTYPES, STORED_ITEMSIZE, dtype

ALIGNMENT: Final = 4096
"""The data begins at a multiple of this, and entries of such a size come first, so that they stay aligned."""
PACK_BYTES_MAX: Final = 4 << 30
HEADER_BYTES_MAX: Final = 50 << 20
"""Half of what safetensors readers take (100 MB)."""
_LENGTH_BYTES: Final = 8
_ENTRY_JSON_BYTES: Final = 160
"""Generous text size of one header entry and its sharding note, besides name and numbers."""

# Keys that torch.distributed.checkpoint's HuggingFaceStorageReader looks for (torch 2.13, _hf_utils.py).
_DCP_VERSION: Final = {"DCP_VERSION": "1.0"}
_DCP_SHARDING: Final = "DCP_SHARDING_INFO"
_DCP_OFFSETS: Final = "saved_offsets"


class PackEntry(msgspec.Struct, frozen=True, gc=False):
    """One box to be packed. ``dtype`` is an element type's name; ``size`` and ``start`` give the box
    of ``global_shape`` in elements; ``nbytes`` is the size of its bytes in C order."""

    name: str
    dtype: str
    size: tuple[int, ...]
    start: tuple[int, ...]
    global_shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class PackLayout:
    """A pack's header, ready to write at offset 0, and where each entry's bytes go."""

    header: bytes
    header_digest: str
    offsets: tuple[int, ...]
    nbytes: int


def order(entries: Sequence[PackEntry]) -> list[int]:
    """Return the order in which entries are packed: multiples of 4096 bytes first, then wide elements first.

    The order keeps entries of one class as they came. Every entry then lies at a multiple of its
    element size, and large matrices at a multiple of 4096.
    """
    widths = {name: row.itemsize for name, row in DTYPES.items()}
    rank = [(entry.nbytes % ALIGNMENT != 0, -_width(widths, entry)) for entry in entries]
    return sorted(range(len(entries)), key=rank.__getitem__)


def _width(widths: Mapping[str, int], entry: PackEntry) -> int:
    width = widths.get(entry.dtype)
    if width is None:
        raise InvalidInput(f"tensor {entry.name!r} has the element type {entry.dtype!r}, which can't be stored")
    return width


def split(entries: Sequence[PackEntry], limit: int = PACK_BYTES_MAX) -> list[list[int]]:
    """Divide entries, which come in packing order, into packs; returns indices, pack by pack.

    A pack holds at most ``limit`` bytes of data (a larger entry gets one for itself), one box of
    each tensor, and a header under 50 MB.
    """
    packs: list[list[int]] = []
    states: list[tuple[int, int, set[str]]] = []  # data bytes, header bytes, names
    for i, entry in enumerate(entries):
        text = _ENTRY_JSON_BYTES + 6 * len(entry.name) + 24 * len(entry.size) * 2
        # Only the last two packs are open: looking further back would cost time for little.
        for at in range(max(0, len(packs) - 2), len(packs)):
            data, header, names = states[at]
            fits = data + entry.nbytes <= limit and header + text <= HEADER_BYTES_MAX
            if fits and entry.name not in names:
                packs[at].append(i)
                names.add(entry.name)
                states[at] = (data + entry.nbytes, header + text, names)
                break
        else:
            packs.append([i])
            states.append((entry.nbytes, text, {entry.name}))
    return packs


def layout_pack(entries: Sequence[PackEntry], writer_metadata: Mapping[str, str] | None = None) -> PackLayout:
    """Return the header and offsets of one pack that holds ``entries`` in this order.

    Where some entry is less than its whole tensor, the header also tells every entry's place in
    its tensor, in the words of torch's HuggingFaceStorageReader. ``InvalidInput`` for two boxes of
    one tensor, sizes that don't match, and names that are no valid Unicode.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "ckptfmt": "1", **(writer_metadata or {})}}
    sharded = any(entry.size != entry.global_shape for entry in entries)
    places: dict[str, dict[str, list[int]]] = {}
    starts: list[int] = []
    position = 0
    for entry in entries:
        row = DTYPES.get(entry.dtype)
        if row is None or prod(entry.size) * row.itemsize != entry.nbytes:
            raise InvalidInput(
                f"tensor {entry.name!r}: {entry.nbytes} bytes are not a box of {list(entry.size)} x {entry.dtype}"
            )
        name = entry.name if entry.name != "__metadata__" else _free_name(entries)
        if name in header:
            raise InvalidInput(f"two boxes of tensor {entry.name!r} can't be in one pack; split() keeps them apart")
        end = position + entry.nbytes
        header[name] = {
            "dtype": row.stored,
            "shape": [*entry.size, *row.stored_suffix],
            "data_offsets": [position, end],
        }
        if sharded:
            places[name] = {_DCP_OFFSETS: [*entry.start, *(0 for _ in row.stored_suffix)]}
        starts.append(position)
        position = end
    if sharded:
        header["__metadata__"].update(_DCP_VERSION)
        header["__metadata__"][_DCP_SHARDING] = _json(places)
    text = _json(header).encode("utf-8")
    padding = -(len(text) + _LENGTH_BYTES) % ALIGNMENT
    head = (len(text) + padding).to_bytes(_LENGTH_BYTES, "little") + text + b" " * padding
    if len(head) > HEADER_BYTES_MAX + ALIGNMENT:
        raise InvalidInput(f"a pack header of {len(head)} bytes is too long for readers; split() keeps it short")
    offsets = tuple(start + len(head) for start in starts)
    return PackLayout(head, checksum.hex_digest(head), offsets, len(head) + position)


def _free_name(entries: Sequence[PackEntry]) -> str:
    # The one name that a safetensors header keeps for itself. Readers go by offsets, not by entry names.
    taken = {entry.name for entry in entries}
    return next(name for name in ("__metadata__" + "~" * i for i in range(1, len(entries) + 2)) if name not in taken)


def _json(value: Any) -> str:
    try:
        return msgspec.json.encode(value).decode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidInput(f"a tensor's name is no valid Unicode and can't be packed: {error.object!r:.100}") from error


class ParsedEntry(msgspec.Struct, frozen=True, gc=False):
    """An entry as the header tells it. ``stored`` is the safetensors dtype word, ``offset`` absolute."""

    name: str
    stored: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class ParsedPack:
    """A valid header. Entries are in the order of their bytes and cover the file from ``header_bytes`` on."""

    entries: tuple[ParsedEntry, ...]
    metadata: Mapping[str, str]
    header_bytes: int


def header_length(first_bytes: bytes, file_nbytes: int) -> int:
    """Return how many bytes the whole header of a pack takes, from at least its first 8 bytes."""
    if len(first_bytes) < _LENGTH_BYTES or file_nbytes < _LENGTH_BYTES:
        raise Corrupt(f"a pack of {file_nbytes} bytes is too short to hold a header")
    length = _LENGTH_BYTES + int.from_bytes(first_bytes[:_LENGTH_BYTES], "little")
    if length > min(file_nbytes, HEADER_BYTES_MAX + ALIGNMENT):
        raise FormatError(
            f"the pack's header claims {length} bytes; the file has {file_nbytes}, and {HEADER_BYTES_MAX} is the most"
        )
    return length


class _Entry(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


_ENTRY_MEMBERS: Final = 3
_WIDE: Final = re.compile(rb'"[ \t\r\n]')


def _parse_metadata(raw: msgspec.Raw | None) -> dict[str, str]:
    what = "the pack's __metadata__"
    return {} if raw is None else strict_json.convert(strict_json.parse(bytes(raw), what), dict[str, str], what)


def _data_offsets(item: tuple[str, _Entry]) -> tuple[int, int]:
    return item[1].data_offsets


def parse_header(head: bytes, file_nbytes: int, itemsizes: Mapping[str, int] = STORED_ITEMSIZE) -> ParsedPack:
    """Return the entries of a pack from its whole header (``header_length`` bytes or more) and the file's size.

    ``FormatError`` unless names are unique and the entries cover the rest of the file exactly, each
    as long as its shape and dtype say. ``itemsizes`` has the dtype words that may stand there, and the bytes of an
    element: those of our packs, unless somebody else's file is read.
    """
    length = header_length(head, file_nbytes)
    if len(head) < length:
        raise InvalidInput(f"a pack header of {length} bytes can't be parsed from its first {len(head)}")
    text = head[_LENGTH_BYTES:length]
    if text[:1] != b"{":
        raise FormatError("the pack's header does not begin with a JSON object")
    raw = strict_json.members(text, "the pack's header")
    metadata = _parse_metadata(raw.pop("__metadata__", None))
    if _WIDE.search(text) or any(bytes(row).count(b'":') != _ENTRY_MEMBERS for row in raw.values()):
        strict_json.parse(text, "the pack's header")  # no compact text of plain entries: look at every member
    rows = strict_json.decode(strict_json.join(raw), dict[str, _Entry], "the pack's header")
    position = 0
    entries = []
    for name, row in sorted(rows.items(), key=_data_offsets):
        begin, end = row.data_offsets
        shape = row.shape
        itemsize = itemsizes.get(row.dtype, 0)
        if begin != position or itemsize == 0 or prod(shape) * itemsize != end - begin or (shape and min(shape) < 0):
            raise FormatError(
                f"the pack's entry {name!r} at {begin} to {end} is not {list(shape)} x {row.dtype} "
                f"beginning at {position}, where the last one ends"
            )
        entries.append(ParsedEntry(name, row.dtype, shape, length + begin, end - begin))
        position = end
    if length + position != file_nbytes:
        raise Corrupt(f"the pack's entries end at {length + position}, but the file has {file_nbytes} bytes")
    return ParsedPack(tuple(entries), metadata, length)


def stored_form(name: str, size: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """Return (safetensors dtype word, shape) of the pack entry for a box of element type ``name``."""
    row = dtype(name)
    return row.stored, (*size, *row.stored_suffix)
