"""Every parser under hypothesis: bytes, words and numbers bent anywhere (field reports FR-124 and FR-125).

``make fuzz`` gives the same targets to a fuzzer that is guided by coverage.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
from fuzz_targets import TARGETS, WORDS, body_of, manifest_text, sealed, tree_text
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfmt.errors import FormatError
from ckptfmt.format import strict_json, tree, verdict

TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[0-9.eE+-]+|[a-z]+|\s+|.', re.DOTALL)


def test_seeds_are_sound() -> None:
    """Else nothing here would begin at what readers take."""
    for name, (target, seeds) in TARGETS.items():
        assert any(map(target, seeds)), name


def escaped(token: bytes) -> bytes:
    """The same string, its first letter written as an escape: another text of one value."""
    return b'"\\u%04x' % token[1] + token[2:] if token[:1] == b'"' and len(token) > 2 and token[1] < 128 else token


@st.composite
def bent(draw: Any, seeds: list[bytes]) -> bytes:
    """A text with up to three of its words replaced, doubled, dropped, moved, escaped or spaced."""
    seed = draw(st.sampled_from(seeds))
    try:
        seed.decode()
        tokens = TOKEN.findall(seed)
    except UnicodeDecodeError:
        tokens = [seed[at : at + 3] for at in range(0, len(seed), 3)]
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(tokens) - 1))
        to = min(len(tokens), at + draw(st.integers(1, 9)))
        how = draw(st.sampled_from(["word", "double", "drop", "move", "escape", "space", "number", "cut"]))
        if how == "word":
            tokens[at] = draw(st.sampled_from(WORDS))
        elif how == "double":
            tokens[at:at] = tokens[at:to]
        elif how == "drop":
            del tokens[at:to]
        elif how == "move":
            there = draw(st.integers(0, len(tokens)))
            tokens[there:there] = tokens[at:to]
        elif how == "escape":
            tokens[at] = escaped(tokens[at])
        elif how == "space":
            tokens[at : at + 1] = [b" ", tokens[at], b"\n"]
        elif how == "number":
            tokens[at] = str(draw(st.integers(-2, 2**70) | st.floats())).encode()
        else:
            del tokens[to:]
        if not tokens:
            break
    return b"".join(tokens)


@pytest.mark.parametrize("name", TARGETS)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_fr125_only_format_errors_come_out(name: str, data: st.DataObject) -> None:
    target, seeds = TARGETS[name]
    target(data.draw(bent(seeds)))


@pytest.mark.long
@pytest.mark.parametrize("name", TARGETS)
@given(data=st.data())
@settings(max_examples=3000, deadline=None)
def test_fr125_only_format_errors_come_out_at_length(name: str, data: st.DataObject) -> None:
    target, seeds = TARGETS[name]
    target(data.draw(bent(seeds) | st.binary(max_size=200)))


@given(st.binary(max_size=120))
@settings(max_examples=60, deadline=None)
def test_fr125_bytes_of_no_kind(data: bytes) -> None:
    for target, _ in TARGETS.values():
        target(data)


# -- one rule each ----------------------------------------------------------------------------------
SOUND = TARGETS["commit"][1][0]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"id":', b'"id":1,"id":'),
        (b'"verdict":"committed"', b'"verdict":"aborted"'),
        (b'"verdict":"committed"', b'"verdict":"perhaps"'),
        (b'"fence":', b'"fence":-'),
        (b'"version":1', b'"version":2'),
        (b'"version":1', b'"version":true'),
        (b'"version":1', b'"version":1e0'),
        (b'"format":"ckptfmt"', b'"format":"other"'),
        (b'"object":"commit"', b'"object":"retired"'),
        (b'"name":"manifest-', b'"name":"../manifest-'),
        (b'"name":"manifest-', b'"name":"/manifest-'),
        (b'"name":"manifest-', b'"name":"\\u0000manifest-'),
        (b'"run":"', b'"run":"\\ud800'),
        (b'"run":"', b'"run":"' + b"x" * 201),
        (b'"step":', b'"step":9223372036854775808'),
        (b'"step":', b'"step":NaN,"x":'),
        (b'"step":', b'"step":1.5,"x":'),
        (b'"id":', b'"id":' + b"9" * 5000),
        (b'"epoch":', b'"epoch":0,"x":'),
        (b'"commit_seq":', b'"commit_seq":null,"x":'),
        (b'"key":"', b'"key":"A'),
    ],
)
def test_a_verdict_whose_digest_holds_is_still_checked(old: bytes, new: bytes) -> None:
    assert old in SOUND
    with pytest.raises(FormatError):
        verdict.decode_commit(sealed(SOUND.replace(old, new, 1)))


@pytest.mark.parametrize("name", ["commit", "retired", "marker", "claim"])
def test_a_verdict_lacks_no_member(name: str) -> None:
    """Not even those that could be taken for granted, as format, version and object."""
    target, seeds = TARGETS[name]
    whole = msgspec.json.decode(seeds[0] + b"}")
    assert target(msgspec.json.encode(whole)[:-1])
    for member in whole:
        rest = {other: value for other, value in whole.items() if other != member}
        assert not target(msgspec.json.encode(rest)[:-1]), member


@pytest.mark.parametrize("name", ["manifest-text", "part-text"])
@pytest.mark.parametrize("member", ["format", "object", "version", "digest_algorithm", "key", "step", "launch"])
def test_a_manifest_without_its_kind_is_none(name: str, member: str) -> None:
    target, seeds = TARGETS[name]
    whole = msgspec.json.decode(seeds[0])
    del whole[member]
    assert not target(msgspec.json.encode(whole))


@pytest.mark.parametrize("data", [b"", b"\n", b"{}", b"null", b"\x00" * 200, b"\xff" * 200, b" " * (1 << 17)])
def test_what_is_no_verdict_at_all(data: bytes) -> None:
    for decode in (verdict.decode_commit, verdict.decode_retired, verdict.decode_marker, verdict.decode_claim):
        for whole in (data, sealed(data)):
            with pytest.raises(FormatError):
                decode(whole)


def test_a_verdict_may_not_be_longer_than_is_read() -> None:
    padded = body_of(sealed(SOUND.replace(b'"format"', b'"padding":"%b","format"' % (b"x" * 65_000), 1)))
    verdict.decode_commit(sealed(padded))
    with pytest.raises(FormatError, match="at most 65536 are read"):
        verdict.decode_commit(sealed(padded.replace(b"xx", b"x" * 900, 1)))


@pytest.mark.parametrize(
    "number", [b"1e999", b"-1e999", b"1" * 400 + b".0", b"1E+400", b"1" * 250 + b"e99", b"2" * 210 + b"E+99"]
)
def test_numbers_beyond_a_float_are_refused_not_infinite(number: bytes) -> None:
    for text in (number, b"[%b]" % number, b'{"dict":[["a",%b]]}' % number):
        with pytest.raises(FormatError, match=r"beyond the range"):
            strict_json.parse(text, "the state")
    assert strict_json.parse(b"[1e308, 1e-999, 1E+05]", "the state") == [1e308, 0.0, 1e5]
    assert not manifest_text(TARGETS["manifest-text"][1][0].replace(b'"step":', b'"step":%b,"x":' % number, 1))


@pytest.mark.parametrize(
    "node",
    [
        {"zoneinfo": "America"},
        {"zoneinfo": "x" * 5000},
        {"zoneinfo": "../../../etc/passwd"},
        {"zoneinfo": "/etc/passwd"},
        {"datetime": ["2025-01-02", 0, {"zoneinfo": "Etc"}]},
        {"fraction": [1, 0]},
        {"fraction": [{"int": "0x" + "f" * 20_000}, 3]},
        {"int": "0x" + "g"},
        {"decimal": "1,5"},
        {"range": [0, 1, 0]},
        {"timedelta": [10**12, 0, 0]},
        {"numpy.dtype": "V99999999999999999999"},
        {"numpy.scalar": ["float32", "00"]},
        {"bytes": "????"},
        {"uuid": []},
        {"deque": [[1, 2, 3], 2]},
        {"set": [[]]},
        {"set": [1, 1]},
        {"dict": [[[], 1]]},
        {"slice": [1]},
        {"path": ["Path", "x"]},
    ],
    ids=lambda node: next(iter(node)),
)
def test_values_that_are_none_are_malformed(node: Any) -> None:
    with pytest.raises(FormatError):
        tree.decode(node, lambda tag, payload: None)
    assert tree_text(msgspec.json.encode(node))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"dict": [["a", 1], []]}, {"dict": [["a", 1]]}),
        ({"dict": [["a", 1], "xy"]}, {"dict": [["a", 1]]}),
        ({"state_dict": 5}, {"state_dict": 6}),
        ({"state_dict": [5, None]}, {"state_dict": [6, None]}),
        ({"defaultdict": ["int", {"a": 1}]}, {"defaultdict": ["int", [["b", 1]]]}),
        ({"tuple": None}, {"tuple": 1}),
        ({"tuple": {"0": 1}}, {"tuple": {"0": 2}}),
        ({"stateful": "abcd"}, {"stateful": "abce"}),
    ],
)
def test_ranks_with_malformed_nodes_cannot_be_united(one: Any, other: Any) -> None:
    with pytest.raises(FormatError, match="malformed"):
        tree.unite({0: one, 1: other})


def test_ranks_with_deep_trees_cannot_be_united() -> None:
    def deep(inner: Any) -> Any:
        for _ in range(900):
            inner = [inner]
        return inner

    with pytest.raises(FormatError, match="nested too deeply"):
        tree.unite({0: deep(1), 1: deep(2)})


def test_a_fraction_that_could_not_be_read_is_not_written() -> None:
    from fractions import Fraction

    from ckptfmt.errors import UnsupportedValue

    largest = Fraction(2**65_536 - 1, 2**65_535)
    assert tree.decode(tree.encode(largest, lambda path, value: None), lambda tag, payload: None) == largest
    with pytest.raises(UnsupportedValue, match="fraction of more than 65536 bits"):
        tree.encode({"a": Fraction(2**65_536, 3)}, lambda path, value: None)
