"""Small objects that claim much. ``python bombs.py NAME ...`` lets them off in a process with little memory."""

from __future__ import annotations

import contextlib
import json
import random
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import zstandard
from fuzz_targets import TARGETS, sealed

from ckptfmt.errors import FormatError
from ckptfmt.format import pack, tree, tree_walk, verdict
from ckptfmt.format.manifest import decode_manifest

ROOM_BYTES = 768 << 20
"""Address space above what the imports take."""
SECONDS_MAX = 20.0
"""Of computing, for each bomb. A hundred times what a sound object of that size takes is still far below."""

MANIFEST = TARGETS["manifest-text"][1][0]
packed = zstandard.ZstdCompressor(level=3).compress


def refused(decode: Callable[[bytes], Any], data: bytes) -> None:
    try:
        decode(data)
    except FormatError:
        return
    raise AssertionError(f"{decode} took {len(data)} bytes: {data[:80]!r}")


def no_manifest(text: bytes) -> None:
    refused(decode_manifest, packed(text))


def bent() -> Any:
    return json.loads(MANIFEST)


# -- frames -----------------------------------------------------------------------------------------
def a_gigabyte_of_zeros() -> None:
    maker = zstandard.ZstdCompressor(level=3).compressobj(size=1 << 30)
    piece = bytes(1 << 20)
    refused(decode_manifest, b"".join([*(maker.compress(piece) for _ in range(1 << 10)), maker.flush()]))


def spaces_that_are_fine_to_unpack() -> None:
    no_manifest(b" " * (16 << 20))


def a_frame_that_does_not_tell_its_size() -> None:
    refused(decode_manifest, zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 24)))


def frames_in_a_row() -> None:
    refused(decode_manifest, packed(MANIFEST) + packed(MANIFEST))
    refused(decode_manifest, bytes.fromhex("502a4d18ffffff7f") + packed(MANIFEST))
    refused(decode_manifest, bytes.fromhex("502a4d1804000000") + b"skip" + packed(MANIFEST))


def a_frame_that_tells_another_size() -> None:
    frame = bytearray(zstandard.ZstdCompressor(write_checksum=False).compress(b" " * 70_000))
    at = frame.index((70_000).to_bytes(4, "little"))
    for false in (0, 1, 69_999, 70_001, 16 << 20, (1 << 32) - 1):
        frame[at : at + 4] = false.to_bytes(4, "little")
        refused(decode_manifest, bytes(frame))


# -- texts ------------------------------------------------------------------------------------------
def brackets() -> None:
    no_manifest(b"[" * (8 << 20) + b"]" * (8 << 20))
    no_manifest(b"[" + b"[]," * (3 << 20) + b"0]")


def members_without_end() -> None:
    no_manifest(b"{" + b'"a":0,' * (1 << 18) + b'"a":0}')
    no_manifest(("{" + ",".join([f'"{i}":0' for i in range(150_000)]) + "}").encode())


def rows_without_end() -> None:
    value = bent()
    value["tensors"]["shape"] = []
    text = json.dumps(value).encode().replace(b'"shape": []', b'"shape": [' + b"[]," * (1 << 20) + b"[]]")
    assert len(text) > 3 << 20
    no_manifest(text)


def integers_without_end() -> None:
    for digits in (5_000, 1_000_000):
        no_manifest(MANIFEST.replace(b'"step":', b'"step":' + b"7" * digits, 1))
        with contextlib.suppress(FormatError):
            large = {"int": "0x" + "7" * digits}
            tree.decode({"fraction": [large, {"int": "0x" + "3" * digits}]}, lambda tag, payload: None)
        tree.decode(large, lambda tag, payload: None)


def deep_trees() -> None:
    kinds = [
        ("[", "]"),
        ('{"tuple":[', "]}"),
        ('{"dict":[["a",', "]]}"),
        ('{"dict":[[', ",1]]}"),
        ('{"stateful":["a","b",null,', "]}"),
        ('{"registered":["a",', "]}"),
        ('{"set":[', "]}"),
        ('{"deque":[[', "],null]}"),
        ('{"state_dict":[[],', "]}"),
        ('{"int":', "}"),
    ]
    for opening, closing in kinds:
        for depth in (127, 128, 129, 200, 330, 900, 50_000):
            with contextlib.suppress(FormatError):
                node = tree_walk.parse_node((opening * depth + "0" + closing * depth).encode(), "the state")
                tree.decode(node, lambda tag, payload: None, lenient=True)


# -- numbers ----------------------------------------------------------------------------------------
def absurd_shapes() -> None:
    value = bent()
    for shape in ([2**62] * 64, [2**62, 0, 2**62], [0] * 64 + [1], [2**63], [-1, -1], [1.5], [True], [[1]], "x"):
        value["tensors"]["shape"][0] = value["boxes"]["size"][0] = shape
        no_manifest(json.dumps(value).encode())


def absurd_offsets() -> None:
    value = bent()
    for offset in (2**62, 2**63 - 1, 2**63, 2**64, -1, -(2**63), 1.5, True, None, "0"):
        value["boxes"]["offset"][0] = offset
        no_manifest(json.dumps(value).encode())


def a_header_as_large_as_the_disk() -> None:
    """A file with holes can be as long as it likes, and ``verify`` reads headers into memory."""
    value = bent()
    for row in value["packs"]:
        row["nbytes"], row["header_bytes"] = 2**61, 2**60
    value["boxes"]["offset"] = [offset + 2**60 for offset in value["boxes"]["offset"]]
    no_manifest(json.dumps(value).encode())


def boxes_in_no_order() -> None:
    rng, count = random.Random(5), 20_000
    value = bent()
    names = {"name": ["w"], "kind": ["sharded"], "rank": [-1], "dtype": ["uint8"], "shape": [[10**6, 10**6]]}
    boxes = {
        "tensor": [0] * count,
        "start": [[rng.randrange(10**6 - 9), rng.randrange(10**6 - 9)] for _ in range(count)],
        "size": [[9, 9]] * count,
        "pack": [0] * count,
        "offset": [8192 + 81 * i for i in range(count)],
        "digests": ["0" * 32] * count,
    }
    rows = [value["packs"][0] | {"nbytes": 2**40, "header_bytes": 4096}]
    trees = {"common": None, "per_rank": {}}
    value |= {"tensors": names, "boxes": boxes, "packs": rows, "aliases": {}, "trees": trees, "metadata": None}
    refused(decode_manifest, zstandard.compress(json.dumps(value).encode()))


# -- packs and verdicts -----------------------------------------------------------------------------
def pack_headers_of_exabytes() -> None:
    for length in (2**64 - 1, 2**63, 2**40, 100_000_000):
        refused(lambda data: pack.header_length(data, 2**63 - 1), length.to_bytes(8, "little"))
    refused(lambda data: pack.header_length(data, len(data)), (500).to_bytes(8, "little") + b"{}")


def _parse(text: bytes) -> Any:
    head = len(text).to_bytes(8, "little") + text
    return pack.parse_header(head, len(head) + 100)


def pack_entries_that_claim_all() -> None:
    sound = {"dtype": "U8", "shape": [100], "data_offsets": [0, 100]}
    assert _parse(json.dumps({"a": sound}).encode()).entries
    for shape, offsets in (
        ([2**62, 2**62], [0, 100]),
        ([2**64], [0, 100]),
        ([-1], [0, -1]),
        ([-10, -10], [0, 100]),
        ([100], [2**63, 2**63 + 100]),
        ([100], [0, 2**64]),
        ([50], [50, 100]),
        ([99], [0, 99]),
        ([100], [100, 0]),
        ([100.0], [0, 100]),
    ):
        refused(_parse, json.dumps({"a": sound | {"shape": shape, "data_offsets": offsets}}).encode())
    row = json.dumps(sound).encode()
    refused(_parse, b'{"a":%b,"a":%b}' % (row, row))
    refused(_parse, b'{"a":%b,"\\u0061":%b}' % (row, row))
    refused(_parse, b'{"a":%b}' % row.replace(b'"shape"', b'"dtype":"U8","shape"'))
    refused(_parse, b"{" + b'"a":{},' * 100_000 + b'"b":{}}')


def long_verdicts() -> None:
    for body in (
        b"[" * 65_000,
        b'{"a":' * 10_000,
        b'{"a":"' + b"x" * (1 << 26),
        b'{"id":' + b"9" * 60_000,
        b"{" + b'"a":0,' * 10_000 + b'"b":0',
    ):
        refused(verdict.decode_commit, sealed(body))


BOMBS: dict[str, Callable[[], None]] = {
    bomb.__name__: bomb
    for bomb in (
        a_gigabyte_of_zeros,
        spaces_that_are_fine_to_unpack,
        a_frame_that_does_not_tell_its_size,
        frames_in_a_row,
        a_frame_that_tells_another_size,
        brackets,
        members_without_end,
        rows_without_end,
        integers_without_end,
        deep_trees,
        absurd_shapes,
        absurd_offsets,
        a_header_as_large_as_the_disk,
        boxes_in_no_order,
        pack_headers_of_exabytes,
        pack_entries_that_claim_all,
        long_verdicts,
    )
}


def main(names: list[str]) -> None:
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM_BYTES, used + ROOM_BYTES))
    for name in names:
        began = time.process_time()
        BOMBS[name]()
        seconds = time.process_time() - began
        assert seconds < SECONDS_MAX, f"{name}: {seconds:.1f} s"
        print(name, f"{seconds:.2f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
