"""Modules as live objects."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from ckptfmt.errors import Mismatch, UnsupportedValue
from ckptfmt.torch.family import TorchFamily


def small() -> nn.Sequential:
    return nn.Sequential(OrderedDict(conv=nn.Conv1d(2, 3, 2), norm=nn.BatchNorm1d(3), head=nn.Linear(3, 2)))


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")  # nothing is compiled before the first call


def expand(family: TorchFamily, module: nn.Module, path: str = "model") -> Any:
    (expansion,) = family.expand([(path, module)], [])
    return expansion


def same_tensors(a: Any, b: Any) -> bool:
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


def test_a_module_is_live_memory_with_its_metadata(family: TorchFamily, archive: Any) -> None:
    module = small()
    one = expand(family, module)
    assert (one.kind, one.live, one.apply, one.notes) == ("module", True, None, None)
    assert one.type_name == "torch.nn.modules.container.Sequential"
    assert type(one.state) is OrderedDict
    assert list(one.state) == list(module.state_dict())
    assert one.state["head.weight"].data_ptr() == module.head.weight.data_ptr()
    assert one.state._metadata == module.state_dict()._metadata
    decoded = archive.round_trip(one.state)
    assert decoded._metadata == module.state_dict()._metadata
    assert same_tensors(decoded, module.state_dict())


def test_batch_norm_counts_are_restored(archive: Any) -> None:
    module, other = small(), small()
    module.norm(torch.randn(4, 3, 2))
    archive.restore({"model": other}, archive.save({"model": module}))
    assert other.norm.num_batches_tracked == 1
    assert same_tensors(other.state_dict(), module.state_dict())


def wrappers() -> dict[str, Any]:
    def inner_compiled(module: nn.Module) -> nn.Module:
        module.conv = compiled(module.conv)  # type: ignore[assignment]
        return module

    def inner_parallel(module: nn.Module) -> nn.Module:
        module.head = nn.DataParallel(module.head)  # type: ignore[assignment]
        return module

    return {
        "compiled": (compiled, ["_orig_mod"]),
        "parallel": (nn.DataParallel, ["module"]),
        "parallel-compiled": (lambda m: nn.DataParallel(compiled(m)), ["module", "_orig_mod"]),
        "compiled-parallel": (lambda m: compiled(nn.DataParallel(m)), ["_orig_mod", "module"]),
        "compiled-inside": (inner_compiled, ["_orig_mod"]),
        "parallel-inside": (inner_parallel, ["module"]),
        "both": (lambda m: compiled(inner_parallel(m)), ["_orig_mod", "module"]),
    }


@pytest.mark.parametrize("name", wrappers())
def test_wrappers_leave_no_trace_in_names(family: TorchFamily, archive: Any, name: str) -> None:
    wrap, stripped = wrappers()[name]
    bare, wrapped = small(), wrap(small())
    one = expand(family, wrapped)
    assert list(one.state) == list(bare.state_dict())
    assert one.state._metadata == bare.state_dict()._metadata
    assert one.notes == {"stripped": stripped}
    assert one.live
    assert "wrapp" not in one.type_name
    archive.restore({"model": bare}, archive.save({"model": wrapped}))
    assert same_tensors(bare.state_dict(), one.state)
    fresh = wrap(small())
    archive.restore({"model": fresh}, archive.save({"model": bare}))
    assert same_tensors(expand(family, fresh).state, bare.state_dict())


def test_a_user_submodule_called_module_keeps_its_name(family: TorchFamily) -> None:
    module = nn.ModuleDict({"module": nn.Linear(2, 2), "other": nn.DataParallel(nn.Linear(2, 2))})
    assert list(expand(family, module).state) == ["module.weight", "module.bias", "other.weight", "other.bias"]


def test_names_that_clash_once_stripped_are_both_named(family: TorchFamily) -> None:
    module = nn.Module()
    module.a = nn.ModuleDict({"_orig_mod": nn.Linear(1, 1), "weight": nn.Identity()})
    module.a.register_parameter("bias", nn.Parameter(torch.zeros(1)))
    with pytest.raises(Mismatch) as caught:
        expand(family, module)
    assert "model.a.bias" in caught.value.problems[0]
    assert "model.a._orig_mod.bias" in caught.value.problems[0]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def test_tied_weights_keep_both_names_over_the_same_bytes(family: TorchFamily, archive: Any) -> None:
    module = Tied()
    one = expand(family, module)
    assert one.live
    assert list(one.state) == ["embed.weight", "head.weight"]
    aliases = {family.describe(value, name).alias for name, value in one.state.items()}
    assert len(aliases) == 1
    other = Tied()
    archive.restore({"model": other}, archive.save({"model": module}))
    assert other.head.weight is other.embed.weight
    assert torch.equal(other.head.weight, module.head.weight)


class Extra(nn.Module):
    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2))
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize("root", [True, False])
def test_extra_state_is_set_beside_the_filled_tensors(family: TorchFamily, archive: Any, root: bool) -> None:
    def make(extra: Any) -> nn.Module:
        return Extra(extra) if root else nn.Sequential(Extra(extra), compiled(Extra(extra)))

    saved_extra = {"calls": 3, "names": ["a"]}
    module, other = make(saved_extra), make(None)
    assert expand(family, module).live
    archive.restore({"model": other}, archive.save({"model": module}))
    for name, value in module.state_dict().items():
        got = other.state_dict()[name]
        assert got == saved_extra if "_extra_state" in name else torch.equal(got, value)


def test_extra_state_with_tensors_goes_through_load_state_dict(family: TorchFamily, archive: Any) -> None:
    module, other = Extra({"scale": torch.randn(3)}), Extra(None)
    one = expand(family, module)
    assert not one.live
    other.extra = {"scale": torch.zeros(3)}
    archive.restore({"model": other}, archive.save({"model": module}))
    assert torch.equal(other.extra["scale"], module.extra["scale"])
    assert torch.equal(other.weight, module.weight)


class Packed(nn.Module):
    """Saves another form of its weight than it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "packed"] = self.weight.detach() * 2

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        with torch.no_grad():
            self.weight.copy_(state_dict[prefix + "packed"] / 2)


def test_a_module_that_saves_another_form_is_not_live(family: TorchFamily, archive: Any) -> None:
    module, other = compiled(nn.Sequential(Packed())), nn.Sequential(Packed())
    assert not expand(family, module).live
    archive.restore({"model": other}, archive.save({"model": module}))
    assert torch.equal(other[0].weight, module._orig_mod[0].weight)
    wrapped = nn.Sequential(compiled(Packed()))
    archive.restore({"model": wrapped}, archive.save({"model": module}))
    assert torch.equal(wrapped[0].weight, other[0].weight)
    before = other[0].weight.clone()
    with pytest.raises(Mismatch) as caught:
        expand(family, other).apply({"1.packed": torch.zeros(4)})
    assert caught.value.problems == (
        "model.0.packed: missing in the saved state",
        "model.1.packed: saved, but not in this module",
    )
    assert torch.equal(other[0].weight, before)
    with pytest.raises(Mismatch, match=r"1\.packed"):
        expand(family, other).check({"1.packed": torch.zeros(4)})


def test_a_refused_load_state_dict_is_a_mismatch(family: TorchFamily) -> None:
    module = Extra({"scale": torch.zeros(3)})
    with pytest.raises(Mismatch, match="size mismatch"):
        expand(family, module).apply({"weight": torch.zeros(7), "_extra_state": {}})


def test_lazy_modules_are_refused_by_path(family: TorchFamily) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3))
    with pytest.raises(UnsupportedValue, match=r"model\.1\.weight.*first forward pass"):
        expand(family, module)
    module(torch.randn(1, 2))
    assert expand(family, module).live


def test_a_module_on_meta_is_found_out_leaf_by_leaf(family: TorchFamily) -> None:
    with torch.device("meta"):
        module = small()
    one = expand(family, module)
    assert one.live
    for name, value in one.state.items():
        with pytest.raises(UnsupportedValue, match=rf"model\.{name}: .*meta"):
            family.describe(value, f"model.{name}")
        assert "to_empty" in str(family.check_fillable(value, f"model.{name}"))


def test_quantised_or_sparse_parameters_are_refused_by_path(family: TorchFamily) -> None:
    module = nn.Module()
    module.register_buffer("adjacency", torch.eye(3).to_sparse())
    one = expand(family, module)
    with pytest.raises(UnsupportedValue, match=r"model\.adjacency: .*sparse_coo"):
        family.describe(one.state["adjacency"], "model.adjacency")


def test_non_persistent_buffers_stay_out(family: TorchFamily) -> None:
    module = small()
    module.register_buffer("cache", torch.zeros(2), persistent=False)
    assert "cache" not in expand(family, module).state


class Labelled(torch.Tensor):
    """What a subclass makes of its memory is its own affair."""


def test_a_tensor_of_a_subclass_is_not_taken_for_its_memory(family: TorchFamily) -> None:
    module = nn.Module()
    module.weight = nn.Parameter(torch.eye(2).as_subclass(Labelled))
    assert module.state_dict()["weight"].data_ptr() == module.weight.data_ptr()
    assert not expand(family, module).live
    module.weight = nn.Parameter(torch.eye(2))
    assert expand(family, module).live
