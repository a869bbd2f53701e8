"""Walks over a state tree: sub-trees, references, union over ranks."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

import msgspec
import numpy as np
import pytest

from ckptfmt.errors import FormatError, Mismatch, NotFound
from ckptfmt.format import tree


def leaf(path: str, value: Any) -> Any:
    kind = {np.ndarray: "array", bytes: "stored_bytes"}.get(type(value))
    return None if kind is None else tree.reference(kind, path)


def test_subtree() -> None:
    value = {
        "a.b": 1,
        "a": {"b": 2, "b.c": 3, "d": [{"e": 4}, (5, 6)]},
        7: {"x": 8},
        "o": OrderedDict(p=defaultdict(int, q=9)),
    }
    node = tree.encode(value, leaf)
    for dotted, expected in [("a.b", 1), ("a.b.c", 3), ("a.d.0.e", 4), ("a.d.1.1", 6), ("7.x", 8), ("o.p.q", 9)]:
        assert tree.subtree(node, dotted) == expected, dotted
    assert tree.subtree(node, "") is node
    live = {"dict": [["model", tree.stateful("module", "T", None, {"dict": [["w", 1]]})]]}
    assert tree.subtree(live, "model.w") == 1


def test_subtree_lists_near_names() -> None:
    node = tree.encode({"model": {"weight": 1, "bias": 2}}, leaf)
    with pytest.raises(NotFound, match=r"'model.wieght'.*'model'.*'weight'"):
        tree.subtree(node, "model.wieght")
    with pytest.raises(NotFound, match="'model'"):
        tree.subtree(node, "modle")


def test_references_in_order() -> None:
    node = tree.encode({"a": np.zeros(1), "b": [np.zeros(1), b"x" * 2000], "s": "tensor"}, leaf)
    node["dict"].append(["r", tree.per_rank("slot")])
    assert list(tree.references(node)) == [
        ("array", "a"),
        ("array", "b.0"),
        ("stored_bytes", "b.1"),
        ("per_rank", "slot"),
    ]
    with pytest.raises(FormatError, match="reference"):
        list(tree.references({"tensor": [1]}))
    with pytest.raises(FormatError, match="slot"):
        list(tree.references({"per_rank": 1}))


def test_the_first_reference_is_found_in_the_text() -> None:
    odd = 'q"{'
    node = {
        "dict": [
            ["text", '{"array":"a"}'],
            [odd, {"tensor": "b"}],
            ["p", {"tensor": ["c", "parameter"]}],
            ["again", {"array": "c"}],
            ["n", {"array": "b"}],
            ["k", {"tensor": odd}],
            ["deep", {"tuple": [{"stored_bytes": "a"}, {"array": "ü"}]}],
        ]
    }
    text = msgspec.json.encode(node)
    tags = ("array", "tensor")
    assert [tree.first_tag(text, [name], tags) for name in ("a", "b", "c", odd, "ü", "x")] == [
        None, "tensor", "tensor", "tensor", "array", None
    ]  # fmt: skip
    assert tree.first_tag(text, ["ü", "c"], tags) == "tensor"
    assert tree.first_tag(b'{"tensor":"a"}', [], tags) is None


def test_unite() -> None:
    a = tree.encode({"x": 1, "l": [1, {"p": 1}], "o": OrderedDict(k=1), "t": (1, {"z": 0})}, leaf)
    b = tree.encode({"y": 2, "x": 1, "l": [1, {"q": 2}], "o": OrderedDict(m=2), "t": (1, {"w": 0})}, leaf)
    value = tree.decode(tree.unite({1: b, 0: a}), leaf)
    expected = {
        "x": 1, "l": [1, {"p": 1, "q": 2}], "o": OrderedDict(k=1, m=2), "t": (1, {"z": 0, "w": 0}), "y": 2
    }  # fmt: skip
    assert msgspec.json.encode(tree.encode(value, leaf)) == msgspec.json.encode(tree.encode(expected, leaf))


def test_unite_lists_every_difference() -> None:
    a = tree.encode({"step": 1, "l": [1, 2], "same": 0, "n": {"deep": [0.0]}, "k": 1}, leaf)
    b = tree.encode({"step": 2, "l": [1], "same": 0, "n": {"deep": [-0.0]}, "k": True}, leaf)
    with pytest.raises(Mismatch) as caught:
        tree.unite({0: a, 3: b})
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["step", "l", "n.deep.0", "k"]
    assert "rank 0 has 1, rank 3 2" in str(caught.value)
    assert "PerRank" in str(caught.value)


def test_paths_are_always_text() -> None:
    assert tree.join("a", ("x", 1)) == "a.('x', 1)"
    assert tree.join("", 5) == "5"
    tree.component("\ud800").encode("utf-8")
    tree.component(("\ud800",)).encode("utf-8")
