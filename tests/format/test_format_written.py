"""The short way to read finds what the long way finds, and takes nothing that the long way refuses."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import manifest_fixtures as fix
import msgspec
import pytest
from test_format_manifest import large
from test_format_mutations import TARGETS, bend

from ckptfmt.errors import CkptError, FormatError
from ckptfmt.format import manifest, part, written
from ckptfmt.format.manifest import Manifest
from ckptfmt.format.part import Part, encode_part

MANIFESTS = [
    fix.manifest(),
    large(50),
    fix.manifest(tensors=large(0).tensors, boxes=large(0).boxes, trees=large(0).trees),
]


def long_manifest(text: bytes) -> Manifest:
    return manifest.validate(manifest._read(text, "the manifest")).manifest


def long_part(text: bytes) -> Part:
    value = part._read(text, "the part")
    part.validate_part(value)
    return value


def outcome(read: Callable[[bytes], Any], text: bytes) -> Any:
    try:
        return read(text)
    except CkptError as error:
        return type(error)


@pytest.mark.parametrize("value", MANIFESTS)
def test_what_is_written_is_read_the_short_way(value: Manifest) -> None:
    text = msgspec.json.encode(value)
    found = written.read(text, Manifest)
    assert found == manifest._read(text, "the manifest") == value
    assert msgspec.json.encode(found) == text


def test_columns_share_nothing() -> None:
    found = written.read(msgspec.json.encode(large(3)), Manifest)
    assert found is not None
    assert found.boxes.size == found.tensors.shape
    assert found.boxes.size is not found.tensors.shape


def test_a_part_is_read_the_short_way() -> None:
    value = fix.part(tensors=large(20).tensors, boxes=large(20).boxes, packs=large(20).packs, chunk_bytes=8 << 20)
    assert written.read(encode_part(value), Part) == value


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"step":5', b'"step":5,"step":5'),
        (b'"step":5', b'"step":4,"step":5'),
        (b'"step":5', b'"step": 5'),
        (b'"step":5', b'"later":1,"step":5'),
        (b'"name":["w"', b'"name":["v"],"name":["w"'),
        (b'["lr",0.1]', b'["lr",0.10]'),
        (b'["lr",0.1]', b'["lr",%s]' % (b"7" * 5000)),
        (b'["lr",0.1]', b'["lr",NaN]'),
        (b'"kind":["sharded"', b'"kind":["torn"'),
        (b'"dtype":["float32"', b'"dtype":["float33"'),
        (b'"shape":[[2,3]', b'"shape":[[2,-3]'),
        (b'"shape":[[2,3]', b'"shape":[{"2":3}'),
        (b'"start":[[0,0]', b'"start":[[0,-1]'),
        (b'"aliases":{"tied":"w"}', b'"aliases":{"tied":"b","tied":"w"}'),
    ],
)
def test_no_other_text_is(old: bytes, new: bytes) -> None:
    text = msgspec.json.encode(fix.manifest())
    assert old in text
    assert written.read(text.replace(old, new, 1), Manifest) is None


@pytest.mark.parametrize("target", ["manifest text", "part"])
def test_both_ways_agree_on_damage(target: str) -> None:
    text = TARGETS[target][0]
    short, long = {
        "manifest text": (lambda data: manifest.decode_manifest(fix.stored(data)), long_manifest),
        "part": (part.decode_part, long_part),
    }[target]
    rng = random.Random(11)
    sound = 0
    for _ in range(300):
        bent = msgspec.json.encode(bend(msgspec.json.decode(text), rng))
        found = outcome(short, bent)
        assert found == outcome(long, bent), bent
        sound += not isinstance(found, type)
    assert sound > 5


def test_a_newer_version_is_not_read_the_short_way() -> None:
    for change in ({"version": 2}, {"read_features": ["x"]}, {"digest_algorithm": "crc32"}):
        text = msgspec.json.encode(fix.manifest(**change))
        assert written.read(text, Manifest) is not None
        assert manifest.read_exact(text, Manifest) is None
        with pytest.raises(FormatError):
            manifest.decode_manifest(fix.stored(text))
