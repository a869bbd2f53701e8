"""An OCDBT database whose values are ranges of objects that exist already: bytes of its nodes and its manifest.

OCDBT is TensorStore's key-value format: a B+tree of nodes in data files, and ``manifest.ocdbt``, which says where the
root lies. Its published description calls the format experimental; what is written here is version 0 without
compression, and the tests read it with TensorStore. Integers in columns are LEB128; a column holds one value for each
entry, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import Final, NamedTuple

from ckptfmt.errors import InvalidInput
from ckptfmt.format.crc32c import crc32c

MANIFEST: Final = "manifest.ocdbt"
"""Name of the manifest, given by the format."""

_MANIFEST_MAGIC: Final = 0x0CDB3A2A
_NODE_MAGIC: Final = 0x0CDB20DE
_HEAD: Final = b"\0\0"  # version 0, no compression
_ARITY_LOG2: Final = 4
_INLINE_BYTES_MAX: Final = 1 << 20
"""More of a value no reader takes from a node."""
_DECODED_NODE_BYTES_MAX: Final = 8 << 20
_NODE_ENTRIES: Final = 2048
_LEAF_BYTES: Final = 1 << 20
"""So much of keys and values ends a leaf before it has ``_NODE_ENTRIES``: a reader fetches leaves whole."""
_KEY_BYTES_MAX: Final = 0xFFFF


class Range(NamedTuple):
    """A value that lies elsewhere. ``file`` is relative to the database's base."""

    file: str
    offset: int
    nbytes: int


Value = bytes | Range


@dataclass(frozen=True)
class Database:
    """``nodes`` is the content of the one file with all nodes; ``manifest`` that of ``manifest.ocdbt``."""

    nodes: bytes
    manifest: bytes


def encode_database(
    values: Iterable[tuple[str, Value]], *, nodes_file: str, uuid: bytes, committed_ns: int = 0
) -> Database:
    """The database of ``values``, at least one, in any order; no key twice.

    ``nodes_file`` is where its nodes will lie, relative to the base; ``uuid`` are 16 bytes, ``committed_ns`` counts
    from the epoch. ``InvalidInput`` for a key or a value that the format has no room for.
    """
    entries = sorted(((_key(key), _checked(key, value)) for key, value in values), key=itemgetter(0))
    if not entries or len(uuid) != 16:
        raise InvalidInput("an OCDBT database needs an entry, and a uuid of 16 bytes")
    written = _Nodes(nodes_file)
    level = [written.leaf(group, alone=len(group) == len(entries)) for group in _leaves(entries)]
    height = 0
    while len(level) > 1:
        height += 1
        groups = [level[at : at + _NODE_ENTRIES] for at in range(0, len(level), _NODE_ENTRIES)]
        level = [written.interior(group, height, alone=len(groups) == 1) for group in groups]
    return Database(bytes(written.data), _manifest(level[0], height, nodes_file, uuid, committed_ns))


def _key(text: str) -> bytes:
    key = text.encode()
    if len(key) > _KEY_BYTES_MAX:
        raise InvalidInput(f"the key {text[:80]!r}... has {len(key)} bytes; OCDBT has room for {_KEY_BYTES_MAX}")
    return key


def _checked(key: str, value: Value) -> Value:
    if isinstance(value, bytes) and len(value) > _INLINE_BYTES_MAX:
        raise InvalidInput(f"the value of {key!r} has {len(value)} bytes; within a node there is room for 1 MiB")
    return value


class _Statistics(NamedTuple):
    """Of a subtree."""

    keys: int
    tree_bytes: int
    referenced_bytes: int


@dataclass(frozen=True)
class _Node:
    """A node that was written. ``stripped`` bytes are common to all keys below it, and not repeated there."""

    first: bytes
    last: bytes
    stripped: int
    offset: int
    nbytes: int
    statistics: _Statistics


_Entry = tuple[bytes, Value]


class _Nodes:
    """The file of nodes, written from the leaves up."""

    def __init__(self, file: str) -> None:
        self._file = file
        self.data = bytearray()

    def leaf(self, entries: Sequence[_Entry], *, alone: bool) -> _Node:
        keys = [key for key, _ in entries]
        stripped = 0 if alone else common(keys[0], keys[-1])
        ranges = [value for _, value in entries if isinstance(value, Range)]
        inline = [value for _, value in entries if isinstance(value, bytes)]
        files = sorted({value.file for value in ranges})
        number = {file: at for at, file in enumerate(files)}
        body = bytearray(_HEAD + b"\0" + _file_table(files) + _varint(len(entries)))
        prefixes, suffixes = _suffixes([key[stripped:] for key in keys])
        body += _column(prefixes) + _column(map(len, suffixes)) + b"".join(suffixes)
        body += _column(value.nbytes if isinstance(value, Range) else len(value) for _, value in entries)
        body += bytes(isinstance(value, Range) for _, value in entries)
        body += _column(number[value.file] for value in ranges) + _column(value.offset for value in ranges)
        body += b"".join(inline)
        referenced = sum(value.nbytes for value in ranges)
        return self._write(keys[0], keys[-1], stripped, body, _Statistics(len(entries), 0, referenced))

    def interior(self, children: Sequence[_Node], height: int, *, alone: bool) -> _Node:
        first, last = children[0].first, children[-1].last
        stripped = 0 if alone else common(first, last)
        body = bytearray(_HEAD + bytes([height]) + _file_table([self._file]) + _varint(len(children)))
        prefixes, suffixes = _suffixes([child.first[stripped:] for child in children])
        body += _column(prefixes) + _column(map(len, suffixes))
        body += _column(child.stripped - stripped for child in children) + b"".join(suffixes)
        body += _column(0 for _ in children)
        body += _column(child.offset for child in children) + _column(child.nbytes for child in children)
        columns = list(zip(*(child.statistics for child in children), strict=True))
        for column in columns:
            body += _column(column)
        return self._write(first, last, stripped, body, _Statistics(*map(sum, columns)))

    def _write(self, first: bytes, last: bytes, stripped: int, body: bytearray, below: _Statistics) -> _Node:
        framed = _frame(_NODE_MAGIC, body)
        offset = len(self.data)
        self.data += framed
        statistics = below._replace(tree_bytes=below.tree_bytes + len(framed))
        return _Node(first, last, stripped, offset, len(framed), statistics)


def _leaves(entries: Sequence[_Entry]) -> list[list[_Entry]]:
    groups: list[list[_Entry]] = []
    filled = 0
    for key, value in entries:
        nbytes = len(key) + (len(value) if isinstance(value, bytes) else 0)
        if not groups or filled + nbytes > _LEAF_BYTES or len(groups[-1]) == _NODE_ENTRIES:
            groups.append([])
            filled = 0
        groups[-1].append((key, value))
        filled += nbytes
    return groups


def _manifest(root: _Node, height: int, nodes_file: str, uuid: bytes, committed_ns: int) -> bytes:
    body = bytearray(_HEAD)
    # All versions within this one manifest (kind 0); then limits for writers; no compression.
    body += uuid + _column((0, _INLINE_BYTES_MAX, _DECODED_NODE_BYTES_MAX)) + bytes([_ARITY_LOG2]) + _varint(0)
    body += _file_table([nodes_file])
    body += _column((1, 1)) + bytes([height])  # one version, with the number 1
    body += _column((0, root.offset, root.nbytes)) + _column(root.statistics)
    body += committed_ns.to_bytes(8, "little")
    body += _varint(0)  # no older versions
    return _frame(_MANIFEST_MAGIC, body)


def _frame(magic: int, body: bytes | bytearray) -> bytes:
    head = magic.to_bytes(4, "big") + (len(body) + 16).to_bytes(8, "little")
    framed = head + body
    return framed + crc32c(framed).to_bytes(4, "little")


def _file_table(files: Sequence[str]) -> bytes:
    prefixes, suffixes = _suffixes([file.encode() for file in files])
    columns = _column(prefixes) + _column(map(len, suffixes)) + _column(0 for _ in files)  # no base of their own
    return _varint(len(files)) + columns + b"".join(suffixes)


def _suffixes(texts: Sequence[bytes]) -> tuple[list[int], list[bytes]]:
    """What each has in common with the one before (of the second and those after it), and what follows that."""
    prefixes = [common(one, other) for one, other in pairwise(texts)]
    return prefixes, [*texts[:1], *(text[at:] for text, at in zip(texts[1:], prefixes, strict=True))]


def common(one: bytes, other: bytes) -> int:
    """Length of the common prefix."""
    n = min(len(one), len(other))
    differing = int.from_bytes(one[:n], "big") ^ int.from_bytes(other[:n], "big")
    return n - (differing.bit_length() + 7) // 8


def _column(values: Iterable[int]) -> bytes:
    return b"".join(map(_varint, values))


_SHORT: Final = [bytes([value]) for value in range(0x80)]


def _varint(value: int) -> bytes:
    if value < 0x80:
        return _SHORT[value]
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
