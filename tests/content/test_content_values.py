"""What a state may hold besides plain tensors, case by case as users of other systems met them (FR-055 to FR-069)."""

from __future__ import annotations

import collections
import datetime as dt
import enum
import math
import pathlib
import random
import uuid
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from content_fixtures import exact, stored_bytes
from torch.utils._pytree import tree_map

import ckptfmt
from ckptfmt.connect import live_families
from ckptfmt.format import tree_registry


def round_trip(state: Any, place: Path) -> Any:
    ckptfmt.save(state, place)
    loaded = ckptfmt.load(place)
    assert exact(loaded) == exact(state)
    return loaded


@pytest.fixture(autouse=True)
def registrations(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it. Torch's own types stay: they are registered once a process."""
    live_families()
    for table in ("_by_type", "_by_name"):
        monkeypatch.setattr(tree_registry, table, dict(getattr(tree_registry, table)))


# -- FR-055, FR-056: ties -------------------------------------------------------------------------------
def test_fr055_tied_tensors_are_stored_once_and_tied_again(tmp_path: Path) -> None:
    w = torch.nn.Parameter(torch.randn(300, 400))
    generation = ckptfmt.save({"emb": w, "head": w, "view": w.detach()}, tmp_path)
    assert generation.nbytes == w.nbytes
    assert stored_bytes(generation) < w.nbytes + 8192
    assert set(generation) == {"emb", "head", "view"}
    loaded = ckptfmt.load(tmp_path)
    assert loaded["emb"] is loaded["head"]
    assert loaded["view"].data_ptr() == loaded["emb"].data_ptr()
    assert type(loaded["view"]) is torch.Tensor


def test_fr055_an_alias_can_be_read_alone(tmp_path: Path) -> None:
    w = torch.arange(12.0).view(3, 4)
    generation = ckptfmt.save({"emb": w, "head": w}, tmp_path)
    assert torch.equal(generation["head"][1:], w[1:])
    assert torch.equal(generation["head"].read(), w)
    assert torch.equal(ckptfmt.load(tmp_path, subtree="head"), w)
    alone = ckptfmt.load(tmp_path, keys="head")
    assert list(alone) == ["head"]
    assert torch.equal(alone["head"], w)


def test_fr055_a_module_with_tied_weights_stays_tied(tmp_path: Path) -> None:
    def model() -> torch.nn.Module:
        made = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False))
        made[1].weight = made[0].weight
        return made

    saved, live = model(), model()
    generation = ckptfmt.save({"model": saved}, tmp_path)
    assert generation.nbytes == saved[0].weight.nbytes
    ckptfmt.restore({"model": live}, tmp_path)
    assert live[0].weight is live[1].weight
    assert torch.equal(live[0].weight, saved[0].weight)


def test_fr056_the_direction_of_a_tie_is_the_checkpoints_business(tmp_path: Path) -> None:
    """Whichever name came first, every live name gets the bytes, and none is left on meta."""
    w = torch.randn(4, 3)
    ckptfmt.save({"head": w, "emb": w}, tmp_path)
    live = {"emb": torch.zeros(4, 3), "head": torch.zeros(4, 3)}
    ckptfmt.restore(live, tmp_path)
    assert torch.equal(live["emb"], w)
    assert torch.equal(live["head"], w)
    with pytest.raises(ckptfmt.Mismatch, match=r"head.*to_empty|to_empty"):
        ckptfmt.restore({"emb": torch.zeros(4, 3), "head": torch.zeros(4, 3, device="meta")}, tmp_path)


def test_fr055_two_saved_tensors_do_not_collapse_into_one_that_is_tied_here(tmp_path: Path) -> None:
    ckptfmt.save({"emb": torch.zeros(3), "head": torch.ones(3), "twin": torch.ones(3)}, tmp_path)
    w, other = torch.full((3,), 7.0), torch.full((3,), 7.0)
    with pytest.raises(ckptfmt.Mismatch, match="emb and head: one tensor here") as caught:
        ckptfmt.restore({"emb": w, "head": w, "twin": other}, tmp_path)
    assert len(caught.value.problems) == 1
    assert w.tolist() == [7.0] * 3
    tied = torch.zeros(3)
    ckptfmt.restore({"emb": w, "head": tied, "twin": tied}, tmp_path)  # equal bytes: nothing is lost
    assert tied.tolist() == [1.0] * 3


# -- FR-057, FR-058: views ------------------------------------------------------------------------------
def test_fr058_a_slice_of_a_large_tensor_takes_the_room_of_the_slice(tmp_path: Path) -> None:
    big = torch.arange(10**7, dtype=torch.float32)
    state = {"a": big[:10], "b": big[5:15]}
    generation = ckptfmt.save(state, tmp_path)
    assert generation.nbytes == 80
    assert stored_bytes(generation) < 10_000
    assert exact(ckptfmt.load(tmp_path)) == exact(state)


def test_fr058_overlapping_views_are_stored_each_on_its_own(tmp_path: Path) -> None:
    base = torch.arange(8.0)
    ckptfmt.save({"a": base[:5], "b": base[3:], "windows": base.unfold(0, 4, 1)}, tmp_path)
    loaded = ckptfmt.load(tmp_path)
    loaded["a"][3] = -1.0
    assert loaded["b"][0] == 3.0
    assert torch.equal(loaded["windows"], base.unfold(0, 4, 1))


def test_conjugate_and_negative_views_are_stored_by_value(tmp_path: Path) -> None:
    z = torch.tensor([1 + 2j, 3 - 4j])
    ckptfmt.save({"conj": z.conj(), "imag": z.conj().imag, "z": z}, tmp_path)
    loaded = ckptfmt.load(tmp_path)
    assert loaded["conj"].tolist() == [1 - 2j, 3 + 4j]
    assert loaded["imag"].tolist() == [-2.0, 4.0]
    assert loaded["z"].tolist() == z.tolist()


# -- FR-060: wrapper tensors ----------------------------------------------------------------------------
class Scaled(torch.Tensor):
    """A wrapper subclass: int8 values and a scale."""

    @staticmethod
    def __new__(cls, values: torch.Tensor, scale: torch.Tensor) -> Scaled:
        made = torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)
        made.values_, made.scale_ = values, scale
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def plain(x: Any) -> Any:
            return x.values_.float() * x.scale_ if isinstance(x, Scaled) else x

        return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))


def test_fr060_a_wrapper_subclass_is_refused_by_path_until_it_is_registered(tmp_path: Path) -> None:
    value = Scaled(torch.tensor([1, -2, 3], dtype=torch.int8), torch.tensor(0.5))
    with pytest.raises(ckptfmt.UnsupportedValue, match=r"layers\.0\.w.*Scaled.*register_type"):
        ckptfmt.save({"layers": [{"w": value}]}, tmp_path)
    ckptfmt.register_type(
        Scaled,
        name="tests.Scaled",
        encode=lambda x: {"values": x.values_, "scale": x.scale_},
        decode=lambda state: Scaled(state["values"], state["scale"]),
    )
    ckptfmt.save({"layers": [{"w": value}]}, tmp_path)
    loaded = ckptfmt.load(tmp_path)["layers"][0]["w"]
    assert type(loaded) is Scaled
    assert loaded.values_.tolist() == [1, -2, 3]
    assert loaded.scale_.item() == 0.5


def test_fr060_a_class_unknown_at_load_is_named_and_never_a_plain_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckptfmt.register_type(
        Scaled, name="tests.Scaled", encode=lambda x: [x.values_], decode=lambda s: Scaled(s[0], torch.ones(()))
    )
    ckptfmt.save({"w": Scaled(torch.ones(2, dtype=torch.int8), torch.ones(())), "ok": torch.ones(2)}, tmp_path)
    monkeypatch.setattr(tree_registry, "_by_name", {})
    with pytest.raises(ckptfmt.UnsupportedValue, match=r"tests\.Scaled.*register_type"):
        ckptfmt.load(tmp_path)
    assert ckptfmt.load(tmp_path, subtree="ok").tolist() == [1.0, 1.0]


# -- FR-061, FR-063: structure --------------------------------------------------------------------------
def test_fr061_nested_containers_and_colliding_names(tmp_path: Path) -> None:
    state = {
        "k": [{"x": torch.ones(1)}, {"y": torch.full((2,), 2.0)}, [], [[torch.zeros(1)]]],
        "a.b": torch.tensor([1]),
        "a": {"b": torch.tensor([2]), "b~1": torch.tensor([3])},
        0: torch.tensor([4]),
        "0": torch.tensor([5]),
        (1, "x"): torch.tensor([6]),
        True: 7,
        None: 8,
        2.5: 9,
    }
    loaded = round_trip(state, tmp_path)
    assert [type(key) for key in loaded] == [type(key) for key in state]
    with ckptfmt.open(tmp_path) as repository:
        generation = repository.latest()
        names = set(generation)
        assert len(names) == len(generation) == 9
        assert {"a.b", "a.b~1", "0", "0~1"} <= names
        assert {int(generation[name].read()[0]) for name in names if name.startswith(("a", "0", "("))} == set(
            range(1, 7)
        )


def test_fr061_a_list_that_was_empty_in_the_template_grows(tmp_path: Path) -> None:
    state = {"k": [{"x": 1}, {"y": 2}], "a.b": 1, "a": {"b": 2}, 0: 3, "0": 4}
    ckptfmt.save(state, tmp_path)
    template: dict[Any, Any] = {"k": [], "a.b": 0, "a": {}, 0: 0, "0": 0}
    kept = template["k"], template["a"]
    ckptfmt.restore(template, tmp_path)
    assert exact(template) == exact(state)
    assert template["k"] is kept[0]
    assert template["a"] is kept[1]


class Point(NamedTuple):
    x: float
    y: Any


class Colour(enum.Enum):
    RED = 1


KEYS = ["a/b", "..", "", ".", "/", "a.b", "~1", "x~1", "__metadata__", "con", "*", "[a]"]
KEYS += ["ключ", "\N{SNOWMAN}", "a\nb", "\0", "\ud800"]


def test_fr063_keys_are_never_paths(tmp_path: Path) -> None:
    state = {key: torch.tensor([number]) for number, key in enumerate(KEYS)}
    state["nested"] = {key: torch.tensor([100 + number]) for number, key in enumerate(KEYS)}  # type: ignore[assignment]
    round_trip(state, tmp_path)
    files = {path.name for path in tmp_path.rglob("*")}
    assert all(name.isascii() for name in files)
    live = tree_map(torch.zeros_like, state)
    ckptfmt.restore(live, tmp_path)
    assert exact(live) == exact(state)


def test_fr063_a_tensor_and_a_container_at_the_root(tmp_path: Path) -> None:
    for number, state in enumerate([torch.ones(2), np.ones(2), [], {}, (), [torch.ones(1)], 5, None, "text"]):
        round_trip(state, tmp_path / str(number))


def test_fr063_empty_containers_keep_their_kind(tmp_path: Path) -> None:
    round_trip(
        {
            "dict": {},
            "list": [],
            "tuple": (),
            "set": set(),
            "frozenset": frozenset(),
            "odict": collections.OrderedDict(),
            "counter": collections.Counter(),
            "deque": collections.deque(maxlen=3),
            "default": collections.defaultdict(list),
            "str": "",
            "bytes": b"",
            "bytearray": bytearray(),
            "array": np.empty((0, 3)),
            "tensor": torch.empty(0),
        },
        tmp_path,
    )


def test_fr063_namedtuples_and_enums_come_back_as_registered(tmp_path: Path) -> None:
    ckptfmt.register_type(Point, name="tests.content.Point", encode=tuple, decode=lambda items: Point(*items))
    ckptfmt.register_type(Colour, name="tests.content.Colour", encode=lambda c: c.name, decode=Colour.__getitem__)
    loaded = round_trip({"p": Point(1.5, torch.ones(2)), "c": Colour.RED, Colour.RED: 1}, tmp_path)
    assert type(loaded["p"]) is Point
    assert loaded["c"] is Colour.RED


def test_fr063_a_registered_value_is_restored_as_a_whole(tmp_path: Path) -> None:
    ckptfmt.register_type(Point, name="tests.content.Point", encode=tuple, decode=lambda items: Point(*items))
    ckptfmt.save({"p": Point(1.5, torch.ones(2)), "q": Point(0.0, torch.nn.Linear(1, 1))}, tmp_path)
    live: dict[str, Any] = {"p": Point(0.0, torch.zeros(2)), "q": None}
    ckptfmt.restore(live, tmp_path, keys="p")
    assert exact(live["p"]) == exact(Point(1.5, torch.ones(2)))
    with pytest.raises(ckptfmt.Mismatch, match="q: a Point is restored as a whole, but this one holds live objects"):
        ckptfmt.restore({"p": live["p"], "q": Point(0.0, torch.nn.Linear(1, 1))}, tmp_path)


@pytest.mark.parametrize("value", [Point(1.0, 2), Colour.RED], ids=["namedtuple", "enum"])
def test_fr063_an_unregistered_kind_is_refused_by_path_never_turned_into_another(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ckptfmt.UnsupportedValue, match=rf"config\.v.*{type(value).__name__}.*register_type"):
        ckptfmt.save({"config": {"v": value}}, tmp_path)


# -- FR-062: plain values ---------------------------------------------------------------------------------
def test_fr062_plain_values_are_assigned_back_into_their_containers(tmp_path: Path) -> None:
    state = {"step": 7, "name": "b", "loss": [1.0, [2.0]], "best": None, "pair": (1, 2), "cfg": {"on": True}}
    ckptfmt.save(state, tmp_path)
    live: dict[str, Any] = {
        "step": 0,
        "name": "",
        "loss": [],
        "best": 3.0,
        "pair": (0, 0),
        "cfg": {"on": False},
    }
    report = ckptfmt.restore(live, tmp_path)
    assert exact(live) == exact(state)
    assert {"step", "name", "loss.0", "loss.1.0", "best", "pair.0", "pair.1", "cfg.on"} == set(report.loaded)


def test_fr062_what_was_asked_for_and_is_not_there_is_an_error(tmp_path: Path) -> None:
    ckptfmt.save({"w": torch.ones(2)}, tmp_path)
    with pytest.raises(ckptfmt.Mismatch, match=r"step: not in the checkpoint"):
        ckptfmt.restore({"w": torch.zeros(2), "step": 0}, tmp_path)


# -- FR-068: values besides tensors -----------------------------------------------------------------------
def test_fr068_everyday_python_values(tmp_path: Path) -> None:
    round_trip(
        {
            "none": None,
            "bools": [True, False],
            "ints": [0, -1, 2**53, 2**53 + 1, -(2**63), 2**80, -(2**80), 10**400],
            "floats": [0.0, -0.0, 1e-320, math.inf, -math.inf, math.nan, -math.nan, 0.1],
            "complex": [1 - 2j, complex(math.nan, -0.0)],
            "text": ["", "ü", "\0", "\ud800"],
            "bytes": [b"", b"\0\xff", bytes(5000), bytearray(b"x" * 3000), bytearray(b"y")],
            "path": [Path("x/y"), pathlib.PureWindowsPath("c:\\x"), pathlib.PurePosixPath("..")],
            "time": [
                dt.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=dt.UTC),
                dt.datetime(2026, 1, 2),
                dt.date(2026, 1, 2),
                dt.timedelta(days=-1, microseconds=1),
            ],
            "numbers": [Decimal("1.10"), Fraction(1, 3), uuid.UUID(int=7), range(3, 9, 2), slice(1, None, -1)],
            "sets": [{1, 2}, frozenset({"a"})],
            "deque": collections.deque([1, 2], maxlen=4),
            "counter": collections.Counter("abca"),
            "default": collections.defaultdict(int, {"x": 1}),
            "numpy": [np.float32(1), np.int64(-5), np.bool_(True), np.complex64(1j), np.dtype("f4"), np.float64(-0.0)],
            "torch": [torch.Size([2, 3]), torch.float8_e4m3fn, torch.device("cuda", 7), torch.channels_last],
        },
        tmp_path,
    )


def test_fr068_generator_states_captured_by_hand(tmp_path: Path) -> None:
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "numpy-dict": np.random.default_rng(3).bit_generator.state,
        "torch": torch.get_rng_state(),
    }
    loaded = round_trip(state, tmp_path)
    random.setstate(loaded["python"])
    np.random.set_state(loaded["numpy"])
    torch.set_rng_state(loaded["torch"])


def test_fr068_a_live_rng_continues_where_it_was(tmp_path: Path) -> None:
    own = np.random.default_rng(5)
    state = {"rng": ckptfmt.Rng({"own": own})}

    def draw() -> list[float]:
        return [random.random(), np.random.rand(), torch.rand(()).item(), own.random()]

    draw()
    ckptfmt.save(state, tmp_path)
    expected = [draw(), draw()]
    report = ckptfmt.restore(state, tmp_path)
    assert [draw(), draw()] == expected
    assert report.loaded == ("rng",)


@pytest.mark.parametrize(
    "value", [lambda: 1, object(), print, type, iter([]), (i for i in []), (5).__add__], ids=lambda v: type(v).__name__
)
def test_fr068_all_else_is_refused_with_its_path(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ckptfmt.UnsupportedValue, match=r"config\.hooks\.1"):
        ckptfmt.save({"config": {"hooks": [1, value]}}, tmp_path)
    with pytest.raises(ckptfmt.UnsupportedValue, match=r"metadata.*hook"):
        ckptfmt.save({"a": 1}, tmp_path, metadata={"hook": value})


def test_a_state_that_contains_itself_is_refused(tmp_path: Path) -> None:
    loop: dict[str, Any] = {}
    loop["again"] = loop
    with pytest.raises(ckptfmt.UnsupportedValue, match="contains itself"):
        ckptfmt.save(loop, tmp_path)


def test_tensors_do_not_belong_in_metadata(tmp_path: Path) -> None:
    with pytest.raises(ckptfmt.UnsupportedValue, match=r"metadata w.*Tensor"):
        ckptfmt.save({"a": 1}, tmp_path, metadata={"w": torch.ones(1)})


# -- FR-066, FR-067: shapes and kinds ---------------------------------------------------------------------
def test_fr066_scalars_and_empty_tensors_have_entries(tmp_path: Path) -> None:
    state = {"s": torch.tensor(5.0), "e": torch.empty(0), "i": torch.empty(3, 0, 2, dtype=torch.int8)}
    generation = ckptfmt.save(state, tmp_path)
    assert {name: (t.shape, t.dtype, t.nbytes) for name, t in generation.items()} == {
        "s": ((), "float32", 4),
        "e": ((0,), "float32", 0),
        "i": ((3, 0, 2), "int8", 0),
    }
    assert exact({name: t.read() for name, t in generation.items()}) == exact(state)
    live = {"s": torch.zeros(()), "e": torch.empty(0), "i": torch.empty(3, 0, 2, dtype=torch.int8)}
    assert ckptfmt.restore(live, tmp_path).loaded == ("s", "e", "i")


def test_fr067_kinds_are_explicit(tmp_path: Path) -> None:
    state = {"own": ckptfmt.PerRank({"t": torch.arange(2), "n": 5}), "all": torch.arange(3)}
    ckptfmt.save(state, tmp_path)
    loaded = ckptfmt.load(tmp_path)
    assert exact(loaded) == exact({"own": {"t": torch.arange(2), "n": 5}, "all": torch.arange(3)})
    live = {
        "own": ckptfmt.PerRank({"t": torch.zeros(2, dtype=torch.int64), "n": 0}),
        "all": torch.zeros(3, dtype=torch.int64),
    }
    ckptfmt.restore(live, tmp_path)
    assert exact(live["own"].value) == exact({"t": torch.arange(2), "n": 5})  # type: ignore[union-attr]


# -- FR-069: renames --------------------------------------------------------------------------------------
@pytest.mark.parametrize("rename", [{"m": ""}, lambda name: name.removeprefix("m.")], ids=["mapping", "function"])
def test_fr069_a_rename_that_meets_an_existing_name_names_both(tmp_path: Path, rename: Any) -> None:
    ckptfmt.save({"m": {"a": torch.ones(1)}, "a": torch.zeros(1)}, tmp_path)
    with pytest.raises(ckptfmt.Mismatch, match=r"m\.a and a both become a"):
        ckptfmt.restore({"a": torch.zeros(1)}, tmp_path, rename=rename)
