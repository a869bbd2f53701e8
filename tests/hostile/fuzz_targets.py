"""The parsers as functions of bytes: whatever they are given, nothing but a ``FormatError`` may come out.

Each returns True if it took the bytes. What it takes has to be the same on every way it can be read, and to be written
and read again as the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zstandard

from ckptfmt.errors import FormatError, InvalidInput, Mismatch, NotFound, UnsupportedValue
from ckptfmt.exchange.dcp_metadata import parse_metadata
from ckptfmt.exchange.weight_map import parse_index
from ckptfmt.format import checksum, layout, manifest, pack, part, strict_json, tree, tree_walk, verdict
from ckptfmt.format.boxes import volume
from ckptfmt.format.index import Index
from ckptfmt.format.manifest import Manifest
from ckptfmt.format.merge import merge_parts
from ckptfmt.format.part import Part
from ckptfmt.format.trees import Trees

GOLDEN = Path(__file__).parent.parent / "golden"


def _one(folder: str, pattern: str) -> bytes:
    return sorted(GOLDEN.glob(f"{folder}/{pattern}"))[0].read_bytes()


def _all(pattern: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted(GOLDEN.glob(pattern))]


def _outcome(read: Callable[[bytes], Any], data: bytes) -> Any:
    """The value, or FormatError for whichever of them it was."""
    try:
        return read(data)
    except FormatError:
        return FormatError


# -- manifest and part ------------------------------------------------------------------------------
def _short_manifest(text: bytes) -> Manifest:
    """The trees of a manifest stay text until somebody asks: here that is at once."""
    found = manifest.decode_manifest(zstandard.compress(text))
    trees = Trees(common=found.trees.common, per_rank=found.trees.per_rank)
    return msgspec.structs.replace(found, trees=trees)


def _long_manifest(text: bytes) -> Manifest:
    return manifest.validate(manifest._read(text, "the manifest")).manifest


def _long_part(text: bytes) -> Part:
    value = part._read(text, "the part")
    part.validate_part(value)
    return value


def manifest_stored(data: bytes) -> bool:
    return _outcome(manifest.decode_manifest, data) is not FormatError


def manifest_text(data: bytes) -> bool:
    """Both ways to read a manifest agree; what they found can be used and written again."""
    short, long = _outcome(_short_manifest, data), _outcome(_long_manifest, data)
    assert same(short, long), (short, long)
    if short is FormatError:
        return False
    assert same(manifest.decode_manifest(manifest.encode_sound(manifest.validate(short))), short)
    index = Index(short)
    for name in index:
        for entry in index.entries(name):
            assert len(entry.boxes) >= 1
            assert sum(box.nbytes for box in entry.boxes) == entry.nbytes
    assert short.nbytes >= 0
    use_tree(short.trees.common)
    return True


def part_text(data: bytes) -> bool:
    short, long = _outcome(part.decode_part, data), _outcome(_long_part, data)
    assert same(short, long), (short, long)
    if short is FormatError:
        return False
    assert same(part.decode_part(part.encode_part(short)), short)
    return True


def same(a: Any, b: Any) -> bool:
    """Equal to the last bit: 1, 1.0 and True are three values, and so are 0.0 and -0.0."""
    if a is FormatError or b is FormatError:
        return a is b
    return bool(a == b) and msgspec.json.encode(a) == msgspec.json.encode(b)


def merged(data: bytes) -> bool:
    """The part of one rank beside that of the other. Parts that don't fit are the ranks' ``Mismatch``."""
    try:
        parts = [part.decode_part(data), part.decode_part(_one("v1-two-ranks", "runs/*/*/r00001.part.json"))]
        sound = merge_parts(parts, id=1, parent=None, repository="0" * 8 + "-0000" * 3 + "-" + "0" * 12, run="r")
    except (FormatError, Mismatch):
        return False
    manifest.decode_manifest(manifest.encode_sound(sound))
    return True


# -- packs ------------------------------------------------------------------------------------------
def pack_header(data: bytes) -> bool:
    """With its own length, and with the most that a file system could say."""
    took = False
    for nbytes in (len(data), 2**63 - 1):
        with contextlib.suppress(FormatError):
            length = pack.header_length(data[:8], nbytes)
            if len(data) < length:
                continue  # no reader gets that far: it reads what is announced, or says that the file is short
            found = pack.parse_header(data[:length], nbytes)
            # The short way over compact texts has to find what JSON says, nothing more and nothing less.
            rows = strict_json.parse(data[8:length], "the header")
            metadata = rows.pop("__metadata__", {})
            told = {name: (row["dtype"], row["shape"], row["data_offsets"][0] + length) for name, row in rows.items()}
            assert {entry.name: (entry.stored, list(entry.shape), entry.offset) for entry in found.entries} == told
            assert found.metadata == metadata
            spans = [(entry.offset, entry.offset + entry.nbytes) for entry in found.entries]
            assert spans == sorted(spans)
            assert all(0 <= begin <= end <= nbytes for begin, end in spans)
            took = True
    return took


# -- verdicts ---------------------------------------------------------------------------------------
def sealed(body: bytes) -> bytes:
    """What somebody writes who knows how the digest is made."""
    return body + b',"self_digest":"%b"}\n' % checksum.hex_digest(body).encode()


def body_of(data: bytes) -> bytes:
    return data[: -len(sealed(b""))]


def _verdict(decode: Callable[[bytes], Any], encode: Callable[[Any], bytes]) -> Callable[[bytes], bool]:
    def read(data: bytes) -> bool:
        """As it is, and as a body whose digest holds."""
        took = False
        for whole in (data, sealed(data)):
            found = _outcome(decode, whole)
            if found is not FormatError:
                assert decode(encode(found)) == found
                took = True
        return took

    return read


# -- trees and names --------------------------------------------------------------------------------
def tree_text(data: bytes) -> bool:
    try:
        node = tree_walk.parse_node(data, "the state")
    except FormatError:
        return False
    use_tree(node)
    return True


def use_tree(node: Any) -> None:
    """All that readers do with a node."""
    for lenient in (True, False):
        with contextlib.suppress(FormatError, UnsupportedValue):
            tree.decode(node, lambda tag, payload: (tag, tree.split_reference(payload)[0]), lenient=lenient)
    with contextlib.suppress(FormatError):
        list(tree.references(node))
        tree.first_tag(msgspec.json.encode(node), ["w"], ["tensor", "array"])
    with contextlib.suppress(FormatError, NotFound):
        tree.subtree(node, "a.b.0")
    with contextlib.suppress(FormatError, Mismatch):
        tree.unite({0: node, 1: [node]})


def names(data: bytes) -> bool:
    text = data.decode("utf-8", "surrogateescape")
    layout.parse_commit_hint(text)
    layout.parse_catalog_claim(text)
    with contextlib.suppress(InvalidInput):
        layout.validate_key(text)
        assert not text.startswith(("/", "."))
        assert "/." not in text
    with contextlib.suppress(InvalidInput):
        layout.run_key(text)
    try:
        layout.validate_plain_name(text)
    except FormatError:
        return False
    assert "/" not in text
    assert not text.startswith(".")
    return True


# -- files of other tools -----------------------------------------------------------------------------
def dcp_directory(data: bytes) -> bool:
    """The pickle of a DCP directory: what is taken is whole and made of plain values."""
    try:
        found = parse_metadata(data, "it")
    except FormatError:
        return False
    for tensor in found.tensors.values():
        assert len(tensor.boxes) == len(tensor.items)
        assert sum(volume(size) for _, size in tensor.boxes) == volume(tensor.shape)
    for item in [*found.values.values(), *(item for tensor in found.tensors.values() for item in tensor.items)]:
        assert type(item.file) is str
        assert item.offset >= 0
        assert item.nbytes >= 0
    return True


def safetensors_index(data: bytes) -> bool:
    try:
        found = parse_index(data, "it")
    except FormatError:
        return False
    assert not any("/" in name or name in ("", ".", "..") for name in found.values())
    return True


Target = Callable[[bytes], bool]
_MANIFESTS = _all("v1-*/runs/*/*/manifest-*.zst")
_PACKS = _all("v1-*/runs/*/*/*.safetensors")
_COMMITS = [body_of(data) for data in _all("v1-*/runs/*/*/COMMIT.json")]
_RETIRED = verdict.encode_retired(
    verdict.Retired(
        repository="0" * 8 + "-0000" * 3 + "-" + "0" * 12,
        run="r",
        id=1,
        key="0" * 32,
        retired_at="2025-01-02T03:04:05Z",
    )
)
_CLAIM = verdict.encode_claim(
    verdict.CatalogClaim(
        repository="0" * 8 + "-0000" * 3 + "-" + "0" * 12,
        catalog="1" * 8 + "-0000" * 3 + "-" + "0" * 12,
        epoch=1,
        location="embedded",
    )
)
_SCALARS = (
    b'{"dict":[["a",{"int":"0x1f"}],["b",{"float":"nan"}],["c",{"datetime":["2025-01-02T03:04:05",0,'
    b'{"zoneinfo":"Europe/Berlin"}]}],["d",{"fraction":[1,3]}],["e",{"numpy.dtype":"<f8"}],["f",{"range":[0,9,1]}],'
    b'["g",{"path":["PurePosixPath","x"]}],["h",{"decimal":"1.5"}],["i",{"bytes":"eA=="}],["j",{"set":[1,2]}],'
    b'["k",{"numpy.scalar":["float32","0000803f"]}],["l",{"deque":[[1],3]}],["m",{"defaultdict":["int",[["x",1]]]}],'
    b'["n",{"stateful":["optimizer","AdamW",null,{"dict":[["lr",0.1]]}]}],["o",{"timedelta":[1,2,3]}],'
    b'["p",{"complex":[1.0,2.0]}],["q",{"timezone":[0,null]}],["r",{"time":["03:04:05",0,null]}],["s",{"uuid":"0"}],'
    b'["t",{"slice":[0,1,null]}],["u",{"registered":["x",[1]]}],["v",{"state_dict":[[["w",{"tensor":"w"}]],null]}],'
    b'["w",{"tensor":["w","parameter"]}],["x",{"per_rank":"s"}],["y",{"str":"7aCA"}],[{"tuple":[1]},{"array":"w"}]]}'
)
TARGETS: dict[str, tuple[Target, list[bytes]]] = {
    "manifest": (manifest_stored, _MANIFESTS),
    "manifest-text": (manifest_text, [zstandard.decompress(data) for data in _MANIFESTS]),
    "part-text": (part_text, _all("v1-*/runs/*/*/*.part.json")),
    "merge": (merged, _all("v1-two-ranks/runs/*/*/r00000.part.json")),
    "pack": (
        pack_header,
        [data[: pack.header_length(data[:8], len(data))] for data in _PACKS] + [min(_PACKS, key=len)],
    ),
    "commit": (_verdict(verdict.decode_commit, verdict.encode_commit), _COMMITS),
    "retired": (_verdict(verdict.decode_retired, verdict.encode_retired), [body_of(_RETIRED)]),
    "marker": (
        _verdict(verdict.decode_marker, verdict.encode_marker),
        [body_of(data) for data in _all("v1-*/ckptfmt.json")],
    ),
    "claim": (_verdict(verdict.decode_claim, verdict.encode_claim), [body_of(_CLAIM)]),
    "tree": (tree_text, [_SCALARS]),
    "dcp": (dcp_directory, [Path(__file__).with_name("dcp_directory.metadata").read_bytes()]),
    "index": (
        safetensors_index,
        [b'{"metadata": {"total_size": 8}, "weight_map": {"a.w": "a.safetensors", "b": "b"}}'],
    ),
    "names": (names, [b"00000001-000000000001-" + b"0" * 32, b"00000001.json", b"r00000-p000.safetensors", b"../x"]),
}
"""What to call, and sound bytes to begin with."""

WORDS = [
    b'"version":2', b'-1', b'0', b'1e999', b'1e5', b'9223372036854775808', b'4611686018427387904', b'NaN',
    b'Infinity', b'null', b'true', b'[]', b'{}', b'[[]]', b'""', b'"\\ud800"', b'"\\u0061"', b'\xff', b'\x00',
    b'"../x"', b'"tensor":', b'{"tensor":"w"}', b'{"int":"0x', b'"per_rank"', b'"digests":', b'"digests":[],', b',',
    b':', b' ', b'\n', b'"format":"ckptfmt"', b'"float32"', b'"uint8"', b'"kind":', b'[0,0]',
    b'[18446744073709551616]', b'-0', b'0.0',
    b'[' * 200, b'{"tuple":[' * 130, b'1' * 5000,
]  # fmt: skip
"""What JSON parsers and this format's own rules stumble over; spliced into texts."""
