"""A walk over a state follows the one of the save before, and must not miss anything that changed since."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from ckptfmt.engine.families import Families
from ckptfmt.engine.save.freeze import FrozenTree, Seen, freeze_tree
from ckptfmt.engine.save.snapshot import Planner
from ckptfmt.leaves import PerRank, Sharded
from ckptfmt.torch.family import TorchFamily

State = dict[str, Any]


def families() -> Families:
    return Families([TorchFamily()])


def freeze(state: State, before: Seen | None = None) -> FrozenTree:
    return freeze_tree(state, families(), before)


def same(one: FrozenTree, other: FrozenTree) -> bool:
    return (
        one.common == other.common
        and one.per_rank == other.per_rank
        and one.aliases == other.aliases
        and one.seen.rows == other.seen.rows
        and one.seen.named == other.seen.named
        and [(leaf.name, leaf.spec, type(leaf.family), id(leaf.value)) for leaf in one.leaves]
        == [(leaf.name, leaf.spec, type(leaf.family), id(leaf.value)) for leaf in other.leaves]
    )


def make() -> State:
    weight = nn.Parameter(torch.randn(6, 4))
    return {
        "weight": weight,
        "head": weight,
        "bias": torch.randn(4),
        "square": torch.randn(3, 3),
        "images": torch.randn(2, 3, 4, 4),
        "complex": torch.randn(4, dtype=torch.complex64),
        "part": torch.randn(1),
        "empty": torch.empty(0, 3),
        "strided": torch.randn(8)[::2],
        "array": np.arange(5),
        "other": np.arange(5.0),
        "blob": b"x" * 2000,
        "mine": PerRank({"seen": torch.arange(3)}),
        "box": Sharded(torch.randn(2, 4), (4, 4), (2, 0)),
        "list": [torch.randn(2), {"a.b": torch.randn(3)}, 1.5],
        "a.b": torch.randn(1),
        "a": {"b": torch.randn(1)},
        "step": 3,
    }


def set_data(name: str, value: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[State], None]:
    """The same object, with other memory or another view of it."""

    def change(state: State) -> None:
        state[name].data = value(state[name].data)

    return change


def put(name: str, value: Callable[[State], Any]) -> Callable[[State], None]:
    def change(state: State) -> None:
        state[name] = value(state)

    return change


def rename(old: str, new: str) -> Callable[[State], None]:
    def change(state: State) -> None:
        items = [(new if key == old else key, value) for key, value in state.items()]
        state.clear()
        state.update(items)

    return change


def reverse(state: State) -> None:
    items = list(state.items())[::-1]
    state.clear()
    state.update(items)


CHANGES: dict[str, Callable[[State], Any]] = {
    "a plain value": put("step", lambda s: 4),
    "new memory": put("bias", lambda s: s["bias"].clone()),
    "new memory of the same object": set_data("bias", lambda t: t.clone()),
    "dtype": put("bias", lambda s: s["bias"].double()),
    "dtype, same memory": put("bias", lambda s: s["bias"].view(torch.int32)),
    "dtype of the same object": set_data("bias", lambda t: t.view(torch.int32)),
    "shape, same memory": set_data("weight", lambda t: t.view(4, 6)),
    "shorter, same memory": set_data("bias", lambda t: t[:3]),
    "resized": lambda s: s["bias"].resize_(2),
    "emptied": lambda s: s["bias"].resize_(0),
    "set_": lambda s: s["bias"].set_(torch.randn(4).untyped_storage()),
    "transposed, same shape": lambda s: s["square"].t_(),
    "stride": set_data("strided", lambda t: t.clone()),
    "channels_last": set_data("images", lambda t: t.to(memory_format=torch.channels_last)),
    "requires_grad": lambda s: s["bias"].requires_grad_(),
    "no requires_grad": lambda s: s["weight"].requires_grad_(False),
    "conjugated, same memory": put("complex", lambda s: s["complex"].conj()),
    "conjugated, same object": set_data("complex", lambda t: t.conj()),
    "negated, same memory": set_data("part", torch._neg_view),
    "a parameter now": put("bias", lambda s: nn.Parameter(s["bias"])),
    "a parameter no longer": put("head", lambda s: s["head"].data),
    "a buffer now": put("bias", lambda s: nn.Buffer(s["bias"])),
    "untied": put("head", lambda s: nn.Parameter(s["head"].detach().clone())),
    "tied": put("bias", lambda s: s["square"]),
    "tied to a later one": put("bias", lambda s: s["list"][0]),
    "array instead of tensor": put("bias", lambda s: s["bias"].numpy()),
    "tensor instead of array": put("array", lambda s: torch.from_numpy(s["array"])),
    "array in another order": put("other", lambda s: s["other"][::-1]),
    "array of another byte order": put("array", lambda s: s["array"].astype(">i8")),
    "bytearray instead of bytes": put("blob", lambda s: bytearray(s["blob"])),
    "longer bytes": put("blob", lambda s: b"x" * 3000),
    "tensor instead of bytes": put("blob", lambda s: torch.zeros(2000, dtype=torch.uint8)),
    "plain instead of a tensor": put("bias", lambda s: 0),
    "of all ranks": put("mine", lambda s: s["mine"].value),
    "of this rank": put("bias", lambda s: PerRank(s["bias"])),
    "another box": put("box", lambda s: Sharded(s["box"].local, (6, 4), (2, 0))),
    "whole now": put("box", lambda s: s["box"].local),
    "a box now": put("bias", lambda s: Sharded(s["bias"], (8,), (4,))),
    "gone": lambda s: s.pop("square"),
    "first gone": lambda s: s.pop("weight"),
    "last gone": lambda s: s.pop("a"),
    "nothing left": lambda s: s.clear(),
    "one more": put("later", lambda s: torch.randn(2)),
    "longer list": lambda s: s["list"].append(torch.randn(2)),
    "renamed": rename("bias", "slope"),
    "clash gone": lambda s: s.pop("a.b"),
    "a new clash": rename("bias", "list.0"),
    "another order": reverse,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed(change: str) -> None:
    state = make()
    before = freeze(state)
    CHANGES[change](state)
    after = freeze(state, before.seen)
    assert same(after, freeze(state))
    assert (after.seen is before.seen) == (change == "a plain value")


@pytest.mark.parametrize("seed", range(20))
def test_any_number_of_changes_one_after_the_other(seed: int) -> None:
    dice = random.Random(seed)
    state = make()
    seen = None
    for _ in range(12):
        for name in dice.sample(list(CHANGES), dice.randrange(3)):
            try:
                CHANGES[name](state)
            except (KeyError, AttributeError, RuntimeError, TypeError, ValueError):
                continue  # it does not fit on what earlier changes have left
        frozen = freeze(state, seen)
        assert same(frozen, freeze(state))
        seen = frozen.seen


def test_a_walk_over_an_unchanged_state_makes_nothing_anew() -> None:
    state = make()
    planner = Planner()
    first = planner.freeze(state, families())
    plan = planner.plan(first)
    state["bias"].add_(1)
    second = planner.freeze(state, families())
    assert second.seen is first.seen
    assert planner.plan(second) is plan
    assert second.common == first.common


@pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package")
def test_a_tensor_in_the_place_of_a_distributed_one_is_not_held_by_its_mesh() -> None:
    from torch.distributed.tensor import DeviceMesh, DTensor, Replicate
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        state = {"weight": DTensor.from_local(torch.randn(2, 3), DeviceMesh("cpu", [0, 1]), [Replicate()])}
        before = freeze(state)
        assert before.leaves[0].spec.holders == (0, 1)
        local = {"weight": state["weight"].to_local()}
        after = freeze(local, before.seen)
        assert after.leaves[0].spec.holders == ()
        assert same(after, freeze(local))
        assert same(freeze(state, after.seen), freeze(state))
    finally:
        dist.destroy_process_group()


def test_what_was_seen_keeps_no_tensor_alive() -> None:
    import gc
    import weakref

    state = make()
    planner = Planner()
    planner.plan(planner.freeze(state, families()))
    watched = weakref.ref(state["bias"])
    del state
    gc.collect()
    assert watched() is None


def test_new_memory_of_the_same_structure_keeps_the_plan() -> None:
    state = make()
    planner = Planner()
    plan = planner.plan(planner.freeze(state, families()))
    state["bias"] = state["bias"].clone()
    frozen = planner.freeze(state, families())
    assert planner.plan(frozen) is plan
    (leaf,) = [leaf for leaf in frozen.leaves if leaf.name == "bias"]
    assert leaf.spec.address == state["bias"].data_ptr()


def test_a_state_that_cannot_be_saved_leaves_the_walk_before_in_force() -> None:
    state = make()
    planner = Planner()
    plan = planner.plan(planner.freeze(state, families()))
    with pytest.raises(TypeError, match="broken"):
        planner.freeze({**state, "broken": object()}, families())
    assert planner.plan(planner.freeze(state, families())) is plan
