"""Trees that stay text: what is proven about a text holds for its values, and what isn't proven is looked at."""

from __future__ import annotations

import random
from typing import Any

import manifest_fixtures as fix
import msgspec
import pytest
from test_format_mutations import bend
from test_format_written import long_manifest, outcome

from ckptfmt.errors import FormatError
from ckptfmt.format import manifest
from ckptfmt.format.trees import Trees, TreeTexts, _refers_only_to, check_references

NAMES = dict.fromkeys(["w", "b", ",", ",{", "", 'dict":', 'tensor":', "é", "per_rank", "x y"])


def raw(node: Any) -> msgspec.Raw:
    return msgspec.Raw(node if isinstance(node, bytes) else msgspec.json.encode(node))


def in_trees(old: bytes, new: bytes) -> bytes:
    """A manifest's text, ``old`` replaced by ``new`` where it first stands in the trees."""
    head, mark, trees = msgspec.json.encode(fix.manifest()).partition(b'"trees":')
    assert old in trees
    return head + mark + trees.replace(old, new, 1)


@pytest.mark.parametrize(
    "node",
    [
        None,
        5,
        [],
        {"tensor": "w"},
        {"array": ["b", "parameter"]},
        {"dict": [["k", {"tensor": "é"}], ["per_rank", {"stored_bytes": "per_rank"}], ["x", {"tensor": ""}]]},
        {"dict": [["mine", {"per_rank": "s"}], ["again", {"tuple": [{"per_rank": "s"}, {"tensor": ","}]}]]},
        {"later": [["k", {"tensor": "x y"}]]},
    ],
)
def test_a_sound_text_is_proven(node: Any) -> None:
    assert _refers_only_to(msgspec.json.encode(node), NAMES, frozenset("s"))


@pytest.mark.parametrize(
    "text",
    [
        b'{"tensor":"v"}',
        b'{"tensor":["v","parameter"]}',
        b'{"tensor":5}',
        b'{"tensor":["w"]}',
        b'{"tensor":["w",5]}',
        b'{"tensor":["w","a","b"]}',
        b'{"tensor":{"dict":[]}}',
        b'{"tensor":"w","tensor":"b"}',
        b'{"tensor":"w","b":1}',
        b'{"b":1,"tensor":"v"}',
        b'{"dict":[],"dict":[]}',
        b'{"tensor": "w"}',
        b'{ "tensor":"w"}',
        b'{"tensor" :"w"}',
        b'{"tensor":"\\u0077"}',
        b'{"te\\u006esor":"v"}',
        b'{"tensor":"\xff"}',
        b"{}",
        b'[{},"a:b"]',
        b'["{","b"]',
        b'["a{",{"tensor":"v"}]',
        b'["a{",":",{"tensor":"w"}]',
        b'[{"a":"{","tensor":"v"}]',
        b'{"per_rank":"t"}',
        b'{"per_rank":5}',
        b'{"per_rank":["s"]}',
        b'{"per_rank":"s","per_rank":"t"}',
        b'["cuda:0",{"tensor":"v"}]',
    ],
)
def test_no_other_text_is_proven(text: bytes) -> None:
    assert not _refers_only_to(text, NAMES, frozenset("s"))


def test_long_texts_are_searched_to_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptfmt.format.trees._WINDOW_BYTES", 7)
    pairs = [[f"é{i}", {"tensor": ["w", "parameter"]}] for i in range(50)]
    assert _refers_only_to(msgspec.json.encode({"dict": pairs}), NAMES, frozenset())
    for i in range(50):
        bad = [*pairs[:i], ["k", {"tensor": "v"}], *pairs[i + 1 :]]
        assert not _refers_only_to(msgspec.json.encode({"dict": bad}), NAMES, frozenset())


def test_what_is_not_proven_is_looked_at() -> None:
    sound = TreeTexts(common=raw(b'[{"tensor": "w"},"a:b{"]'), per_rank={"0": {"s": raw({"tensor": "w"})}})
    check_references(sound, {"w": None}, "x")
    assert sound == Trees(common=[{"tensor": "w"}, "a:b{"], per_rank={"0": {"s": {"tensor": "w"}}})
    assert list(sound.nodes()) == [sound.common, {"tensor": "w"}]
    for common, slot in ((["a:", {"tensor": "v"}], None), (None, {"per_rank": "s"}), ([{"per_rank": "t"}], None)):
        with pytest.raises(FormatError, match="not"):
            check_references(TreeTexts(common=raw(common), per_rank={"0": {"s": raw(slot)}}), {"w": None}, "x")


@pytest.mark.parametrize("window", [7, 1 << 16])
@pytest.mark.parametrize(
    "last", [b'{"tensor":"w"}', rb'{"tensor":"\u0077"}', b'{"stored_bytes": "w"}', b'{"per_rank":"s"}']
)
def test_references_are_told_from_the_text_as_from_its_values(
    monkeypatch: pytest.MonkeyPatch, window: int, last: bytes
) -> None:
    monkeypatch.setattr("ckptfmt.format.trees._WINDOW_BYTES", window)
    pairs = [
        ["a", {"array": "b"}],
        ["é", {"tensor": ["é", "parameter"]}],
        ["l", [{"tensor": "b"}, {"tuple": []}]],
        ["z", 0],
    ]
    common = msgspec.json.encode({"dict": pairs}).replace(b'"z",0', b'"z",%b' % last)
    text = TreeTexts(common=raw(common), per_rank={"0": {"s": raw({"array": "w"})}})
    check_references(text, NAMES, "x")
    values = Trees(common=text.common, per_rank=text.per_rank)
    assert list(text.references()) == list(values.references())
    assert list(text.references())[:3] == [("array", "b"), ("tensor", "é"), ("tensor", "b")]
    for names in (["w"], ["b"], ["é"], ["w", "é"], [","], []):
        assert text.first_tag(names, ["tensor", "array"]) == values.first_tag(names, ["tensor", "array"])
    assert text.first_tag(["b"], ["tensor"]) == "tensor"


def test_references_of_a_proven_text_are_told_though_it_is_no_tree() -> None:
    text = TreeTexts(common=raw(b'[%s,{"tensor":"w"}]' % (b"7" * 5000)))
    check_references(text, NAMES, "x")
    assert list(text.references()) == [("tensor", "w")]
    with pytest.raises(FormatError, match="the state"):
        _ = text.common


def test_both_ways_agree_on_bent_trees() -> None:
    text = msgspec.json.encode(fix.manifest())
    rng = random.Random(5)
    sound = 0
    for _ in range(300):
        value = msgspec.json.decode(text)
        value["trees"] = bend(value["trees"], rng)
        bent = msgspec.json.encode(value)
        found = outcome(lambda data: manifest.decode_manifest(fix.stored(data)), bent)
        assert found == outcome(long_manifest, bent), bent
        sound += not isinstance(found, type)
    assert sound > 5


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'{"tensor":"w"}', b'{"tensor":"b","tensor":"w"}'),
        (b'{"tensor":"w"}', b'{"tensor":"\\u0077"}'),
        (b'"e",{', b'"e", {'),
        (b'[["w",', b'[["x",0.10],["w",'),
    ],
)
def test_another_text_is_taken_for_what_it_is(old: bytes, new: bytes) -> None:
    text = in_trees(old, new)
    found = outcome(lambda data: manifest.decode_manifest(fix.stored(data)), text)
    assert found == outcome(long_manifest, text)


def test_a_number_that_is_none_is_refused_when_the_tree_is_asked_for() -> None:
    found = manifest.decode_manifest(fix.stored(in_trees(b'[["w",', b'[["x",%s],["w",' % (b"7" * 5000))))
    with pytest.raises(FormatError, match="the state"):
        _ = found.trees.common
