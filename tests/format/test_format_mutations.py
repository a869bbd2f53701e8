"""Random damage to every kind of object is a FormatError, never another exception, never a wrong pass."""

from __future__ import annotations

import contextlib
import random
import tracemalloc
from collections.abc import Callable
from typing import Any

import golden_fixtures as golden
import msgspec
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfmt.errors import FormatError
from ckptfmt.format import pack, tree, verdict
from ckptfmt.format.manifest import decode_manifest
from ckptfmt.format.part import decode_part

(FOLDER,) = [path.parent for path in golden.GOLDEN.glob("v1-one-rank/runs/*/*/r00000-p001.safetensors")]
MANIFEST = next(FOLDER.glob("*.zst")).read_bytes()
TEXT = zstandard.decompress(MANIFEST)
PART = (FOLDER / "r00000.part.json").read_bytes()
COMMIT = (FOLDER / "COMMIT.json").read_bytes()
PACK = (FOLDER / "r00000-p000.safetensors").read_bytes()


def parse_pack(data: bytes) -> Any:
    length = pack.header_length(data[:8], len(data))
    return pack.parse_header(data[:length], len(data))


def decode_tree(data: bytes) -> Any:
    """A manifest's text, and then its state rebuilt, as a reader does."""
    manifest = decode_manifest(zstandard.compress(data))
    return tree.decode(manifest.trees.common, lambda tag, payload: (tag, str(payload)), lenient=True)


TARGETS: dict[str, tuple[bytes, Callable[[bytes], Any]]] = {
    "manifest": (MANIFEST, decode_manifest),
    "manifest text": (TEXT, decode_tree),
    "part": (PART, decode_part),
    "commit": (COMMIT, verdict.decode_commit),
    "pack": (PACK, parse_pack),
}


def check(data: bytes, decode: Callable[[bytes], Any]) -> None:
    with contextlib.suppress(FormatError):  # any other exception fails the test
        decode(data)


@pytest.mark.parametrize("target", TARGETS)
@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_bytes(target: str, data: st.DataObject) -> None:
    original, decode = TARGETS[target]
    bent = bytearray(original)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(bent) - 1))
        how = data.draw(st.sampled_from(["set", "cut", "insert", "double"]))
        if how == "set":
            bent[at] = data.draw(st.integers(0, 255))
        elif how == "cut":
            del bent[at : at + data.draw(st.integers(1, 50))]
        elif how == "insert":
            bent[at:at] = data.draw(st.binary(min_size=1, max_size=8))
        else:
            bent[at:at] = bent[at : at + data.draw(st.integers(1, 200))]
        if not bent:
            break
    check(bytes(bent), decode)


ODD = [
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**62,
    2**63,
    2**64,
    1.5,
    "",
    "x",
    "../x",
    "\x00",
    [],
    {},
    [[]],
    {"tensor": "w"},
    [0] * 70,
]


def bend(value: Any, rng: random.Random) -> Any:
    """Replace, drop or double one item somewhere in plain JSON."""
    if isinstance(value, dict | list) and value and rng.random() < 0.85:
        key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
        chance = rng.random()
        if chance < 0.1:
            del value[key]
        elif chance < 0.2 and isinstance(value, list):
            value.insert(key, value[key])
        else:
            value[key] = bend(value[key], rng)
        return value
    return rng.choice(ODD)


@pytest.mark.parametrize("target", ["manifest text", "part"])
def test_structure(target: str) -> None:
    original, decode = TARGETS[target]
    rng = random.Random(20250102)
    for _ in range(400):
        check(msgspec.json.encode(bend(msgspec.json.decode(original), rng)), decode)


@pytest.mark.parametrize("target", ["pack"])
def test_header_structure(target: str) -> None:
    rng = random.Random(7)
    length = pack.header_length(PACK[:8], len(PACK))
    for _ in range(400):
        text = msgspec.json.encode(bend(msgspec.json.decode(PACK[8:length]), rng))
        check(len(text).to_bytes(8, "little") + text + PACK[length:], parse_pack)


def test_every_cut_of_every_object() -> None:
    for original, decode in TARGETS.values():
        for end in range(0, len(original), max(1, len(original) // 300)):
            with pytest.raises(FormatError):
                decode(original[:end])


def test_damage_costs_no_memory() -> None:
    rng = random.Random(3)
    tracemalloc.start()
    for _ in range(100):
        for original, decode in TARGETS.values():
            bent = bytearray(original)
            bent[rng.randrange(len(bent))] = rng.randrange(256)
            check(bytes(bent), decode)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 << 20
