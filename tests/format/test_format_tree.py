"""The state tree: exact round trips, refusals that name the path, and walks."""

from __future__ import annotations

import datetime as dt
import enum
import math
import pathlib
import random
import struct
import typing
from collections import Counter, OrderedDict, defaultdict, deque
from decimal import Decimal
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfmt.errors import FormatError, InvalidInput, UnsupportedValue
from ckptfmt.format import strict_json, tree


class Kept:
    """A leaf callback that keeps arrays and long bytes in a dict, as a store would."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def __call__(self, path: str, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            self.values[path] = value
            return tree.reference("array", path, ("flag",))
        if isinstance(value, bytes | bytearray):
            self.values[path] = bytes(value)
            return tree.reference(f"stored_{type(value).__name__}", path)
        return None

    def back(self, tag: str, payload: Any) -> Any:
        value = self.values[tree.split_reference(payload)[0]]
        return bytearray(value) if tag == "stored_bytearray" else value


def through(value: Any) -> Any:
    """Encode, write, read and decode."""
    kept = Kept()
    node = tree.encode(value, kept)
    text = msgspec.json.encode(node)
    return tree.decode(strict_json.parse(text, "the tree"), kept.back)


def same(a: Any, b: Any) -> bool:
    """Equal in type and value, all the way down; order of keys counts, NaN bits and signs of zero count."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, Decimal):
        return repr(a) == repr(b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        pairs = zip(a.items(), b.items(), strict=True) if len(a) == len(b) else [(1, 2)]
        return all(same(x, y) for x, y in pairs) and vars_of(a) == vars_of(b)
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(map(same, a, b)) and getattr(a, "maxlen", 0) == getattr(b, "maxlen", 0)
    if isinstance(a, dt.datetime | dt.time):
        return a == b and a.fold == b.fold and repr(a.tzinfo) == repr(b.tzinfo)
    return bool(a == b)


def vars_of(value: Any) -> Any:
    return getattr(value, "__dict__", None), getattr(value, "default_factory", None)


ODDITIES: dict[str, Any] = {
    "dicts with all kinds of keys": {
        0: 1,
        "0": 2,
        (1, ("x",)): 3,
        None: 4,
        True: 5,
        1.5: 6,
        b"k": 7,
        frozenset({1}): 8,
    },
    "names that are no paths": {"a/b": 1, "..": 2, "": 3, "e": {}, "t": (), "l": [], "o": OrderedDict(), "~1": 0},
    "nested and dotted": {"k": [{"x": 1}, {"y": 2}], "a.b": 1, "a": {"b": 2}, 0: 3, "0": 4},
    "numbers": [2**53, 2**53 + 1, -(2**80), 10**5000, 1e16, 5e-324, 0.1, -0.0, math.inf, -math.inf, math.nan],
    "nan bits": struct.unpack("<d", struct.pack("<Q", 0xFFF8000000000001))[0],
    "complex": [1j, complex(-0.0, math.nan), complex(math.inf, -0.0)],
    "text": ["", "ü\u2028\x00\x7f", "\ud800", "a\udc80b", "\U0001f600"],
    "bytes": [b"", b"\xff" * 1024, b"\xfe" * 1025, bytearray(b"q"), bytearray(5000)],
    "containers": [set(), {1, "a", (2,)}, frozenset(), deque([1, [2]], 7), deque(), range(0), range(9, -(2**70), -3)],
    "slices": [slice(None), slice(1, None, -2), slice("a", b"b")],
    "mappings": [Counter("hello"), defaultdict(list, {"a": [1]}), defaultdict(None), defaultdict(dict, {1: {}})],
    "paths": [pathlib.PurePosixPath("/a/../b"), pathlib.PureWindowsPath(r"c:\x"), pathlib.Path("rel"), pathlib.Path()],
    "times": [
        dt.datetime(1, 1, 1),
        dt.datetime(2024, 10, 27, 2, 30, fold=1),
        dt.datetime.max.replace(tzinfo=dt.UTC),
        dt.date.min,
        dt.time(23, 59, 59, 999999, fold=1),
        dt.timedelta.min,
        dt.timezone(dt.timedelta(microseconds=-1)),
        dt.timezone(dt.timedelta(hours=5, minutes=30), "IST"),
    ],
    "exact numbers": [Decimal("NaN"), Decimal("-0.00"), Decimal("1E+400"), Fraction(1, 3), Fraction(-(2**90), 7)],
    "numpy": [
        np.float32(1),
        np.float64(-0.0),
        np.int8(-1),
        np.bool_(False),
        np.uint64(2**64 - 1),
        np.complex64(1j),
        np.dtype("f4"),
        np.dtype(">i8"),
        np.dtype("U7"),
        np.dtype("M8[ns]"),
        np.dtype("bool"),
    ],
    "arrays": {"a": np.arange(3), "b": [np.zeros((0, 2))]},
    "random state": random.Random(5).getstate(),
    "numpy random state": np.random.RandomState(5).get_state(legacy=True),
    "numpy generator state": np.random.default_rng(5).bit_generator.state,
}


@pytest.mark.parametrize("value", ODDITIES.values(), ids=ODDITIES)
def test_exact(value: Any) -> None:
    if isinstance(value, dict) and True in value:
        assert list(value) == list(through(value))
    assert same(through(value), value)


def test_ml_dtypes_scalars_and_dtypes() -> None:
    import ml_dtypes

    values = [ml_dtypes.bfloat16(1.5), ml_dtypes.float8_e4m3fn(2), np.dtype(ml_dtypes.bfloat16)]
    assert same(through(values), values)


def test_state_dict_keeps_its_metadata() -> None:
    value = OrderedDict(w=1)
    value._metadata = OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
    back = through({"m": value})["m"]
    assert type(back) is OrderedDict
    assert same(back, value)
    assert same(back._metadata, value._metadata)  # type: ignore[attr-defined]


def test_equal_sets_give_equal_bytes() -> None:
    a, b = {8}, {0}  # 0 and 8 collide in a small set, whose order is then that of insertion
    a.add(0)
    b.add(8)
    assert list(a) != list(b)
    assert tree.encode(a, Kept()) == tree.encode(b, Kept())


class Colour(enum.Enum):
    RED = 1


class Point(typing.NamedTuple):
    x: int
    y: Any


class MyDict(dict):  # type: ignore[type-arg]
    pass


class Slotted:
    pass


@pytest.mark.parametrize(
    ("value", "path", "word"),
    [
        ({"a": [1, lambda: 0]}, "a.1", "function"),
        ({"a": {"b": Colour.RED}}, "a.b", "Colour"),
        ({"p": Point(1, 2)}, "p", "Point"),
        ({"d": MyDict()}, "d", "MyDict"),
        ({("t", 1): Slotted()}, "('t', 1)", "Slotted"),
        ({Slotted: 1}, "Slotted", "type"),
        ([np.datetime64("2024-01-01")], "0", "datetime64"),
        ([np.str_("x")], "0", "str_"),
        ([np.longdouble(1)], "0", "longdouble"),
        ({"dtype": np.dtype("i4,f4")}, "dtype", "DType"),
        ({"t": dt.datetime(2024, 1, 1, tzinfo=type("Zone", (dt.tzinfo,), {})())}, "t", "Zone"),
        ({"d": defaultdict(lambda: 0)}, "d", "factory"),
        ({"m": memoryview(b"")}, "m", "memoryview"),
        ({"e": ...}, "e", "ellipsis"),
        ({"i": iter([])}, "i", "iterator"),
    ],
)
def test_refused_by_path_and_type(value: Any, path: str, word: str) -> None:
    with pytest.raises(UnsupportedValue) as caught:
        tree.encode(value, lambda path, value: None)
    assert path in str(caught.value)
    assert word in str(caught.value)


def test_refusal_says_what_to_do() -> None:
    with pytest.raises(UnsupportedValue, match=r"register_type\(Colour"):
        tree.encode(Colour.RED, lambda path, value: None)


def test_odd_attributes_are_not_dropped() -> None:
    value = OrderedDict(a=1)
    value.note = "x"  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedValue, match="note"):
        tree.encode({"o": value}, Kept())


def test_cycles_and_depth() -> None:
    loop: list[Any] = []
    loop.append({"again": loop})
    with pytest.raises(UnsupportedValue, match=r"0\.again\.0\.again.*contains itself"):
        tree.encode(loop, Kept())
    deep: Any = 1
    for _ in range(tree.DEPTH_MAX):
        deep = [deep]
    assert same(through(deep), deep)
    with pytest.raises(UnsupportedValue, match="deep"):
        tree.encode([deep], Kept())


def test_deepest_dicts_can_be_read_again() -> None:
    value: Any = 1
    for _ in range(tree.DEPTH_MAX):
        value = {"k": value}
    assert same(through(value), value)


@pytest.mark.parametrize(
    "text", ["[" * 200 + "]" * 200, '{"tuple":[' * 200 + "]}" * 200, "[" * 100_000 + "]" * 100_000]
)
def test_deep_json_is_refused(text: str) -> None:
    with pytest.raises(FormatError, match="deep"):
        tree.decode(strict_json.parse(text.encode(), "the tree"), Kept().back)


def test_registered_types() -> None:
    tree.register_type(Colour, name="tests.Colour", encode=lambda c: c.name, decode=Colour.__getitem__)
    tree.register_type(Point, name="tests.Point", encode=tuple, decode=lambda t: Point(*t))
    value = {"c": Colour.RED, "p": Point(1, np.arange(2)), "nested": Point(0, Point(1, Colour.RED))}
    back = through(value)
    assert back["c"] is Colour.RED
    assert type(back["nested"].y) is Point
    assert same(back["p"].y, np.arange(2))
    tree.register_type(Colour, name="tests.Colour", encode=lambda c: c.name, decode=Colour.__getitem__)  # again: fine


@pytest.mark.parametrize(
    ("cls", "name"),
    [(Slotted, "tests.Taken"), (int, "tests.int"), (MyDict, ""), (MyDict, "x" * 201), ("no class", "n")],
)
def test_registering_nonsense(cls: Any, name: str) -> None:
    tree.register_type(TheTaken, name="tests.Taken", encode=str, decode=str)
    with pytest.raises(InvalidInput):
        tree.register_type(cls, name=name, encode=str, decode=str)


class TheTaken:
    pass


def test_one_type_has_one_name() -> None:
    tree.register_type(TheTaken, name="tests.Taken", encode=str, decode=str)
    with pytest.raises(InvalidInput, match=r"tests\.Taken"):
        tree.register_type(TheTaken, name="tests.Other", encode=str, decode=str)


def test_a_class_defined_again_takes_its_own_place() -> None:
    def define() -> type:
        class Again(enum.Enum):
            A = 1

        return Again

    first, second = define(), define()
    for cls in (first, second):
        tree.register_type(cls, name="tests.Again", encode=lambda c: c.value, decode=cls)
    assert type(through(second(1))) is second


def test_unknown_types_are_foreign_or_refused() -> None:
    node = {"dict": [["size", {"lib.Unknown": [1]}], ["r", {"registered": ["nobody.knows", [1, {"tuple": []}]]}]]}
    with pytest.raises(UnsupportedValue, match=r"lib\.Unknown"):
        tree.decode(node, Kept().back)
    with pytest.raises(UnsupportedValue, match=r"register_type.*nobody\.knows"):
        tree.decode(node["dict"][1][1], Kept().back)
    value = tree.decode(node, Kept().back, lenient=True)
    assert value == {"size": tree.Foreign("lib.Unknown", [1]), "r": tree.Foreign("nobody.knows", [1, ()])}


def test_library_tags() -> None:
    class Size(tuple):  # type: ignore[type-arg]
        pass

    tree.register_tag(Size, "testlib.Size", list, Size)
    assert type(through(Size((1, 2)))) is Size
    with pytest.raises(FormatError, match=r"testlib\.Size"):
        tree.decode({"testlib.Size": 5}, Kept().back)
    with pytest.raises(InvalidInput, match="library"):
        tree.register_tag(Size, "nodot", list, Size)


def test_live_objects_and_slots() -> None:
    node = tree.stateful("module", "torch.nn.Linear", None, tree.encode({"w": 1}, Kept()))
    assert tree.decode(node, Kept().back) == {"w": 1}
    assert tree.decode(tree.per_rank("rng"), lambda tag, payload: (tag, payload)) == ("per_rank", "rng")


BAD_NODES = [
    {},
    {"a": 1, "b": 2},
    {"dict": 5},
    {"dict": [[1]]},
    {"dict": [[1, 2], [1, 3]]},
    {"dict": [[1, 2], [True, 3]]},
    {"dict": [[[], 1]]},
    {"tuple": {}},
    {"set": [1, 1]},
    {"set": [[]]},
    {"deque": [[1, 2], 1]},
    {"deque": [[], -1]},
    {"deque": [1]},
    {"slice": [1]},
    {"range": [0, 1, 0]},
    {"range": [0, "1", 1]},
    {"int": "12"},
    {"int": "0x"},
    {"int": 5},
    {"float": "1.5"},
    {"float": "nan:zz"},
    {"float": "nan:0000000000000000"},
    {"complex": [1]},
    {"str": "%"},
    {"str": "/w=="},
    {"bytes": "a"},
    {"bytes": 7},
    {"path": ["X", "y"]},
    {"datetime": ["x", 0, None]},
    {"datetime": ["2024-01-01T00:00:00", 2, None]},
    {"datetime": ["2024-01-01T00:00:00", 0, {"int": "0x1"}]},
    {"date": 5},
    {"time": []},
    {"timedelta": [10**10, 0, 0]},
    {"timezone": [10**15, None]},
    {"zoneinfo": "../../etc/passwd"},
    {"zoneinfo": "No/Where"},
    {"uuid": "x"},
    {"decimal": "x"},
    {"fraction": [1, 0]},
    {"numpy.scalar": ["float32", "00"]},
    {"numpy.scalar": ["bits16", "0000"]},
    {"numpy.scalar": ["nope", ""]},
    {"numpy.dtype": "os.system"},
    {"numpy.dtype": "i4,(99,99)f8"},
    {"registered": ["a"]},
    {"registered": [1, 2]},
    {"stateful": [1, 2]},
    {"stateful": [1, "t", None, 2]},
    {"defaultdict": ["eval", []]},
    {"state_dict": [[]]},
    {"counter": [["a"]]},
]


@pytest.mark.parametrize("node", BAD_NODES, ids=str)
def test_malformed_nodes(node: Any) -> None:
    with pytest.raises(FormatError):
        tree.decode([node], Kept().back)


@pytest.mark.parametrize(
    "text", [b"NaN", b"[1,Infinity]", b'{"a":1,"a":2}', b'"\\ud800"', b"\xff", b"", b"[1,]", b"1" * 5000]
)
def test_what_is_no_strict_json(text: bytes) -> None:
    with pytest.raises(FormatError, match="the thing"):
        strict_json.parse(text, "the thing")


@pytest.mark.parametrize(
    "text",
    [b'{"a":1,"b":2,"a":3}', b'{ "a" : 1 , "a" : 2 }', b'{"a":1,"\\u0061":2}', b'{"x\\":":1,"x\\":":2}', b"[]", b"{"],
)
def test_members_are_unique(text: bytes) -> None:
    with pytest.raises(FormatError):
        strict_json.members(text, "the object")


def test_members_of_odd_but_valid_objects() -> None:
    for text in (b"{}", b' { "a" : [1, 2] } ', b'{"a\\",\\"b":1,"c":{}}', '{"ü":"\\u00fc"}'.encode(), b'{"":0}'):
        assert list(strict_json.members(text, "x")) == list(strict_json.parse(text, "x"))


LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.complex_numbers() | st.text() | st.binary(max_size=40)
    | st.decimals() | st.fractions() | st.dates() | st.times() | st.timedeltas() | st.datetimes() | st.uuids()
    | st.datetimes(timezones=st.just(dt.UTC)) | st.text(st.characters(categories=["Cs"]), max_size=3)
)  # fmt: skip
KEYS = (
    st.text() | st.integers() | st.booleans() | st.none() | st.tuples(st.integers(), st.text()) | st.binary(max_size=3)
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict)
        | st.lists(inner, max_size=3).map(lambda items: deque(items, 9))
        | st.sets(st.integers() | st.text(), max_size=4)
    ),
    max_leaves=20,
)


@pytest.mark.slow
@given(VALUES)
@settings(max_examples=300, deadline=None)
def test_round_trip(value: Any) -> None:
    assert same(through(value), value)


def test_nothing_heavy_is_imported() -> None:
    import subprocess
    import sys

    rooms = ("tree", "manifest", "merge", "index", "pack", "layout", "states", "verdict")
    code = f"import sys, {', '.join(f'ckptfmt.format.{room}' for room in rooms)};"
    code += "print([m for m in ('numpy', 'torch', 'ml_dtypes', 'sqlalchemy', 'pickle') if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )
