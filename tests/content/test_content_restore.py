"""``restore`` fills: every live object in its own memory, everything reported, nothing half done."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from content_fixtures import data_start, exact, flip, packs, small_model, train_step, trained
from torch import nn

import ckptfmt


def addresses(module: nn.Module) -> list[int]:
    return [tensor.data_ptr() for tensor in module.state_dict().values()]


# -- live objects ---------------------------------------------------------------------------------------
def test_a_training_state_is_filled_in_place_and_training_goes_on_identically(tmp_path: Path) -> None:
    saved = trained(seed=1, steps=3)
    saved["scaler"] = torch.amp.GradScaler("cpu", init_scale=64.0)
    saved["rng"] = ckptfmt.Rng()
    ckptfmt.save(saved, tmp_path, step=3, metadata={"note": "x", "n": [1, (2,)]})
    expected = [train_step(saved["model"], saved["optimizer"]) for _ in range(3)]

    live = trained(seed=2, steps=0)  # a fresh optimizer: no state yet
    live["scaler"] = torch.amp.GradScaler("cpu")
    live["rng"] = ckptfmt.Rng()
    before = addresses(live["model"])
    model, optimizer = live["model"], live["optimizer"]
    report = ckptfmt.restore(live, tmp_path)

    assert addresses(live["model"]) == before
    assert live["model"] is model
    assert live["optimizer"] is optimizer
    assert live["epoch"] == 1
    assert [train_step(model, optimizer) for _ in range(3)] == expected
    assert exact({k: live[k] for k in ("model", "optimizer", "scaler")}) == exact(
        {k: saved[k] for k in ("model", "optimizer", "scaler")}
    )
    assert (report.generation_id, report.run, report.step) == (1, "default", 3)
    assert report.metadata == {"note": "x", "n": [1, (2,)]}
    assert report.nbytes > sum(p.nbytes for p in model.parameters()) * 3
    assert report.seconds > 0
    assert (report.missing, report.unexpected, report.cast, report.skipped, report.fell_back_from) == ((),) * 5
    assert {"model.0.weight", "optimizer.state.model.0.weight.exp_avg", "epoch", "rng"} <= set(report.loaded)
    assert report.as_json()["loaded"] == list(report.loaded)


def test_a_module_by_itself_is_a_state(tmp_path: Path) -> None:
    saved, live = small_model(1), small_model(2)
    generation = ckptfmt.save(saved, tmp_path)
    assert set(generation) == set(saved.state_dict())
    ckptfmt.restore(live, tmp_path)
    assert exact(live) == exact(saved)
    assert exact(ckptfmt.load(tmp_path)) == exact(saved.state_dict())


def test_objects_in_nested_containers(tmp_path: Path) -> None:
    def state(seed: int) -> dict[str, Any]:
        return {
            "gan": [small_model(seed), {"d": small_model(seed + 1)}],
            "pair": (small_model(seed + 2), torch.full((2,), float(seed)), seed),
            "ema": {"decay": 0.1 * seed, "shadow": [torch.full((3,), float(seed))]},
        }

    saved, live = state(1), state(5)
    held = live["gan"][0], live["pair"][0], live["pair"][1], live["ema"]["shadow"][0]
    ckptfmt.save(saved, tmp_path)
    ckptfmt.restore(live, tmp_path)
    assert exact(live) == exact(saved)
    assert held[0] is live["gan"][0]
    assert held[1] is live["pair"][0]
    assert held[2] is live["pair"][1], "tensors inside a tuple are filled; only its plain values need a new tuple"
    assert held[3] is live["ema"]["shadow"][0]
    assert live["pair"][2] == 1


@pytest.mark.slow
def test_lists_that_grew_and_empty_placeholders(tmp_path: Path) -> None:
    saved = {"losses": [1.0, 2.0, 3.0], "extra": {"a": torch.ones(2), "b": [1]}, "deep": {"history": [torch.zeros(1)]}}
    ckptfmt.save(saved, tmp_path)
    live: dict[str, Any] = {"losses": [9.0], "extra": {}, "deep": {"history": []}}
    losses = live["losses"]
    ckptfmt.restore(live, tmp_path)
    assert exact(live) == exact(saved)
    assert live["losses"] is losses


def test_a_list_of_tensors_of_another_length_is_a_mismatch(tmp_path: Path) -> None:
    ckptfmt.save({"w": [torch.ones(1), torch.ones(1)]}, tmp_path)
    with pytest.raises(ckptfmt.Mismatch, match="w: a list of 1 here, but saved was a list of 2"):
        ckptfmt.restore({"w": [torch.zeros(1)]}, tmp_path)


class Counting:
    """Anything with ``state_dict`` and ``load_state_dict``."""

    def __init__(self, n: int = 0, fail: bool = False) -> None:
        self.n, self.fail = n, fail

    def state_dict(self) -> dict[str, Any]:
        return {"n": self.n, "t": torch.full((2,), float(self.n))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.fail:
            raise RuntimeError("no thanks")
        assert state["t"].tolist() == [float(state["n"])] * 2
        self.n = state["n"]


def test_anything_with_state_dict_is_handed_its_state(tmp_path: Path) -> None:
    ckptfmt.save({"c": Counting(4), "inner": {"c": [Counting(5)]}}, tmp_path)
    live = {"c": Counting(), "inner": {"c": [Counting()]}}
    ckptfmt.restore(live, tmp_path)
    assert live["c"].n == 4  # type: ignore[attr-defined]
    assert live["inner"]["c"][0].n == 5  # type: ignore[index]
    assert ckptfmt.load(tmp_path)["c"]["n"] == 4


def test_an_object_that_refuses_its_state_says_what_was_changed_before(tmp_path: Path) -> None:
    ckptfmt.save({"w": torch.ones(2), "c": Counting(4), "n": 1}, tmp_path)
    with pytest.raises(RuntimeError, match="no thanks") as caught:
        ckptfmt.restore({"w": torch.zeros(2), "c": Counting(fail=True), "n": 0}, tmp_path)
    assert caught.value.__notes__ == ["c: load_state_dict failed during a restore; already changed: w"]


# -- targets of every kind --------------------------------------------------------------------------------
def test_targets_are_filled_whatever_their_layout(tmp_path: Path) -> None:
    value = torch.arange(24.0).view(2, 3, 4)
    ckptfmt.save(dict.fromkeys(("strided", "grad", "permuted", "numpy", "inference"), value), tmp_path)
    big = torch.zeros(2, 6, 4)
    with torch.inference_mode():
        inference = torch.zeros(2, 3, 4)
    live: dict[str, Any] = {
        "strided": big[:, ::2],
        "grad": nn.Parameter(torch.zeros(2, 3, 4)),
        "permuted": torch.zeros(4, 3, 2).permute(2, 1, 0),
        "numpy": np.zeros((2, 3, 4), np.float32, order="F"),
        "inference": inference,
    }
    ckptfmt.restore(live, tmp_path)
    for name, target in live.items():
        assert np.array_equal(np.asarray(target.detach() if isinstance(target, torch.Tensor) else target), value), name
    assert big[:, 1::2].abs().sum() == 0, "the elements between are not ours"
    assert live["grad"].requires_grad
    assert live["grad"].grad is None


def test_torch_and_numpy_fill_each_other_where_dtype_and_shape_agree(tmp_path: Path) -> None:
    """The kind of array is a matter of the live state: only bytes are restored, and they mean the same."""
    ckptfmt.save({"a": np.arange(3, dtype=np.int16), "t": torch.ones(2, dtype=torch.bfloat16)}, tmp_path)
    live = {"a": torch.zeros(3, dtype=torch.int16), "t": np.zeros(2, dtype=__import__("ml_dtypes").bfloat16)}
    ckptfmt.restore(live, tmp_path)
    assert live["a"].tolist() == [0, 1, 2]
    assert live["t"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("target", "why"),
    [
        (np.broadcast_to(np.zeros(3, np.float32), (2, 3)), "read-only"),
        (torch.zeros(3).expand(2, 3), "expanded"),
        (torch.zeros(2, 3, device="meta"), "to_empty"),
        (torch.zeros(2, 3).to_sparse(), "sparse"),
        (np.lib.stride_tricks.as_strided(np.zeros(3, np.float32), (2, 3), (0, 4)), "broadcast"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_targets_that_cannot_be_filled_are_told_before_anything_is_touched(
    tmp_path: Path, target: Any, why: str
) -> None:
    ckptfmt.save({"ok": torch.ones(2), "x": torch.ones(2, 3)}, tmp_path)
    live = {"ok": torch.zeros(2), "x": target}
    with pytest.raises(ckptfmt.Mismatch, match=f"x: .*{why}"):
        ckptfmt.restore(live, tmp_path)
    assert live["ok"].tolist() == [0.0, 0.0]


def test_fr127_meta_parameters_are_refused_until_they_have_memory(tmp_path: Path) -> None:
    saved = small_model(1)
    with pytest.raises(ckptfmt.UnsupportedValue, match=r"model\.0\.weight.*meta.*to_empty"):
        ckptfmt.save({"model": small_model(1).to("meta")}, tmp_path / "refused")
    ckptfmt.save({"model": saved}, tmp_path)
    live = small_model(2).to("meta")
    with pytest.raises(ckptfmt.Mismatch, match="to_empty") as caught:
        ckptfmt.restore({"model": live}, tmp_path)
    assert len(caught.value.problems) == len(saved.state_dict()), "all of them, not the first"
    live.to_empty(device="cpu")
    ckptfmt.restore({"model": live}, tmp_path)
    assert exact(live) == exact(saved)
    assert not any(tensor.is_meta for tensor in live.state_dict().values())


# -- Sharded, PerRank --------------------------------------------------------------------------------------
def test_a_whole_shard_and_its_parts(tmp_path: Path) -> None:
    whole = torch.arange(12.0).view(4, 3)
    generation = ckptfmt.save({"w": ckptfmt.Sharded(whole, (4, 3), (0, 0))}, tmp_path)
    assert generation["w"].shape == (4, 3)
    live = {"w": ckptfmt.Sharded(torch.zeros(2, 3), (4, 3), (1, 0))}
    ckptfmt.restore(live, tmp_path)
    assert torch.equal(live["w"].local, whole[1:3])
    column = {"w": ckptfmt.Sharded(torch.zeros(3, 2).t(), (4, 3), (1, 0))}
    ckptfmt.restore(column, tmp_path)
    assert torch.equal(column["w"].local, whole[1:3])
    plain = {"w": torch.zeros(4, 3)}
    ckptfmt.restore(plain, tmp_path)
    assert torch.equal(plain["w"], whole)
    with pytest.raises(ckptfmt.Mismatch, match=r"w: saved shape \[4, 3\], live shape \[5, 3\]"):
        ckptfmt.restore({"w": ckptfmt.Sharded(torch.zeros(2, 3), (5, 3), (1, 0))}, tmp_path)


def test_a_shard_that_does_not_make_the_whole_is_named(tmp_path: Path) -> None:
    with pytest.raises(ckptfmt.SaveFailed, match=r"layer\.w") as caught:
        ckptfmt.save({"layer": {"w": ckptfmt.Sharded(torch.ones(2, 3), (4, 3), (0, 0))}}, tmp_path)
    assert caught.value.stage == "merge"
    assert isinstance(caught.value.__cause__, ckptfmt.CkptError)


# -- FR-078, FR-079: differences ----------------------------------------------------------------------------
def test_fr078_every_dtype_and_shape_that_differs_is_listed(tmp_path: Path) -> None:
    ckptfmt.save({"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(4), "d": 1}, tmp_path)
    live = {"a": torch.zeros(2, dtype=torch.bfloat16), "b": torch.zeros(4), "c": torch.zeros(4), "d": torch.zeros(())}
    with pytest.raises(ckptfmt.Mismatch) as caught:
        ckptfmt.restore(live, tmp_path)
    assert caught.value.problems == (
        "a: saved dtype float32, live dtype bfloat16 (cast=True converts)",
        "b: saved shape [3], live shape [4]",
        "d: a tensor here, but saved was int 1",
    )
    assert all(problem in str(caught.value) for problem in caught.value.problems)
    assert not any(tensor.any() for tensor in live.values())


def test_fr078_casts_happen_on_request_only_and_are_reported(tmp_path: Path) -> None:
    values = torch.rand(50) * 100
    ckptfmt.save({"w": values, "n": np.arange(3), "same": torch.ones(1)}, tmp_path)
    live = {"w": torch.zeros(50, dtype=torch.bfloat16), "n": np.zeros(3, np.float32), "same": torch.zeros(1)}
    report = ckptfmt.restore(live, tmp_path, cast=True)
    assert report.cast == ("w", "n")
    assert torch.equal(live["w"], values.bfloat16())  # type: ignore[arg-type]
    assert live["n"].tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(ckptfmt.Mismatch, match="shape"):
        ckptfmt.restore({**live, "w": torch.zeros(49, dtype=torch.bfloat16)}, tmp_path, cast=True)


def test_fr079_strict_looks_both_ways(tmp_path: Path) -> None:
    ckptfmt.save({"a": torch.ones(1), "b": torch.ones(1), "only": {"x": 1, "y": [2]}}, tmp_path)
    live = {"b": torch.zeros(1), "c": torch.zeros(1), "here": {"z": 0}}
    with pytest.raises(ckptfmt.Mismatch) as caught:
        ckptfmt.restore(live, tmp_path)
    assert caught.value.problems == (
        "c: not in the checkpoint (missing)",
        "here.z: not in the checkpoint (missing)",
        "a: in the checkpoint only (unexpected)",
        "only.x: in the checkpoint only (unexpected)",
        "only.y.0: in the checkpoint only (unexpected)",
    )
    assert "strict=False" in str(caught.value)
    assert live["b"].item() == 0.0  # type: ignore[union-attr]
    report = ckptfmt.restore(live, tmp_path, strict=False)
    assert (report.loaded, report.missing) == (("b",), ("c", "here.z"))
    assert report.unexpected == ("a", "only.x", "only.y.0")
    assert live["b"].item() == 1.0  # type: ignore[union-attr]


def test_a_module_with_other_layers_lists_them(tmp_path: Path) -> None:
    ckptfmt.save({"model": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))}, tmp_path)
    live = {"model": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3), nn.Linear(3, 1))}
    with pytest.raises(ckptfmt.Mismatch) as caught:
        ckptfmt.restore(live, tmp_path)
    assert {problem.partition(":")[0] for problem in caught.value.problems} == {
        "model.1.weight",
        "model.1.bias",
        "model.2.weight",
        "model.2.bias",
    }


def test_keys_select_live_names(tmp_path: Path) -> None:
    saved = trained(1)
    ckptfmt.save(saved, tmp_path)
    live = trained(2)
    others = exact({key: live[key] for key in ("optimizer", "scheduler", "epoch")})
    report = ckptfmt.restore(live, tmp_path, keys="model.*")
    assert exact(live["model"]) == exact(saved["model"])
    assert exact({key: live[key] for key in ("optimizer", "scheduler", "epoch")}) == others
    assert set(report.loaded) == {f"model.{name}" for name in saved["model"].state_dict()}
    assert {"epoch", "optimizer", "scheduler"} <= set(report.skipped)
    with pytest.raises(ckptfmt.InvalidInput, match=r"optimizer is restored as a whole"):
        ckptfmt.restore(live, tmp_path, keys=["model.*", "*exp_avg"])
    with pytest.raises(ckptfmt.InvalidInput, match="keys="):
        ckptfmt.restore(live, tmp_path, keys=[])


# -- FR-126, zero matches -----------------------------------------------------------------------------------
def test_zero_matches_is_an_error_strict_or_not(tmp_path: Path) -> None:
    ckptfmt.save({"m.w": torch.ones(1), "m": {"b": 1}}, tmp_path)
    for options in ({"strict": False}, {"strict": True}, {"strict": False, "keys": "nothing*"}):
        live = {"w": torch.zeros(1)}
        with pytest.raises(ckptfmt.Mismatch) as caught:
            ckptfmt.restore(live, tmp_path, **options)  # type: ignore[arg-type]
        assert live["w"].item() == 0.0
    assert caught.value.kind == "nothing_loaded"


def test_fr126_a_module_of_which_nothing_fits_is_an_error_even_if_all_else_does(tmp_path: Path) -> None:
    """163 missing keys and one epoch number are not a successful load."""
    ckptfmt.save({"model": {"wrapped." + k: v for k, v in small_model(1).state_dict().items()}, "epoch": 3}, tmp_path)
    live = {"model": small_model(2), "epoch": 0}
    before = exact(live)
    with pytest.raises(ckptfmt.Mismatch, match=r"model: not one of its 9 names .*wrapped.*rename="):
        ckptfmt.restore(live, tmp_path, strict=False)
    assert exact(live) == before
    report = ckptfmt.restore(live, tmp_path, rename={"model.wrapped": "model"})
    assert len(report.loaded) == 10
    assert exact(live["model"]) == exact(small_model(1))


class Compiled(nn.Module):
    """What ``torch.compile`` wraps a module in, as far as names go."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._orig_mod = inner


Compiled.__name__ = Compiled.__qualname__ = "OptimizedModule"


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "bare": lambda m: m,
    "compiled": Compiled,
    "parallel": lambda m: nn.DataParallel(m),
    "both": lambda m: Compiled(nn.DataParallel(Compiled(m))),
}


@pytest.mark.parametrize("inside", WRAPPERS)
def test_fr126_wrappers_leave_no_trace_in_names(tmp_path: Path, inside: str) -> None:
    """Saved from any wrapping, restored into every other one, twice: a second resume is where others broke."""
    source = small_model(1)
    place: Path = tmp_path / "first"
    names = set(ckptfmt.save({"model": WRAPPERS[inside](source)}, place))
    assert names == {f"model.{name}" for name in source.state_dict()}
    for number, wrap in enumerate(WRAPPERS.values()):
        live = small_model(2)
        ckptfmt.restore({"model": wrap(live)}, place)
        assert exact(live) == exact(source)
        if number == 0:
            ckptfmt.save({"model": wrap(live)}, place)


# -- FR-080: optimizers by name -----------------------------------------------------------------------------
def test_fr080_optimizer_state_follows_the_name(tmp_path: Path) -> None:
    def make(order: tuple[str, ...]) -> tuple[nn.ModuleDict, torch.optim.Optimizer]:
        model = nn.ModuleDict({name: nn.Linear(3, 3) for name in order})
        return model, torch.optim.AdamW([p for name in order for p in model[name].parameters()])

    saved, optimizer = make(("a", "b"))
    for number, parameter in enumerate(saved.parameters()):
        parameter.grad = torch.full_like(parameter, float(number + 1))
    optimizer.step()
    ckptfmt.save({"model": saved, "optimizer": optimizer}, tmp_path)
    live, other = make(("b", "a"))
    ckptfmt.restore({"model": live, "optimizer": other}, tmp_path)
    for name in ("a", "b"):
        for kind in ("weight", "bias"):
            mine, theirs = getattr(saved[name], kind), getattr(live[name], kind)
            assert torch.equal(optimizer.state[mine]["exp_avg"], other.state[theirs]["exp_avg"])
            assert torch.equal(mine, theirs)


def test_fr080_an_optimizer_over_other_parameters_lists_the_names(tmp_path: Path) -> None:
    saved = trained(1)
    ckptfmt.save(saved, tmp_path)
    live = trained(2)
    live["optimizer"] = torch.optim.AdamW(list(live["model"].parameters())[:-1], lr=0.01)
    live["scheduler"] = torch.optim.lr_scheduler.StepLR(live["optimizer"], 2)
    before = exact(live)
    with pytest.raises(ckptfmt.Mismatch, match=r"optimizer: model\.3\.bias: saved, but not in this optimizer"):
        ckptfmt.restore(live, tmp_path)
    assert exact(live) == before


def test_renames_reach_the_optimizer_that_goes_by_them(tmp_path: Path) -> None:
    saved = trained(1)
    ckptfmt.save(saved, tmp_path)
    for rename in ({"model": "net"}, lambda name: name.replace("model.", "net.") if name != "model" else "net"):
        live = trained(2)
        live["net"] = live.pop("model")
        report = ckptfmt.restore(live, tmp_path, rename=rename)
        assert exact(live["net"]) == exact(saved["model"])
        assert exact(live["optimizer"]) == exact(saved["optimizer"])
        assert report.unexpected == report.missing == ()


def test_rename_into_deeper_and_flatter_places(tmp_path: Path) -> None:
    ckptfmt.save({"a": {"w": torch.ones(1), "n": 5}, "b": [torch.full((1,), 2.0)]}, tmp_path)
    live = {"w": torch.zeros(1), "n": 0, "deep": {"er": {"x": torch.zeros(1)}}}
    report = ckptfmt.restore(live, tmp_path, rename={"a": "", "b.0": "deep.er.x"})
    assert (live["w"].item(), live["n"], live["deep"]["er"]["x"].item()) == (1.0, 5, 2.0)  # type: ignore[index,union-attr]
    assert set(report.loaded) == {"w", "n", "deep.er.x"}
    with pytest.raises(ckptfmt.Mismatch, match=r"b\.0: in the checkpoint only"):
        ckptfmt.restore(live, tmp_path, rename={"a": ""})
    with pytest.raises(ckptfmt.InvalidInput, match="returned None"):
        ckptfmt.restore(live, tmp_path, rename=lambda name: None)  # type: ignore[arg-type,return-value]


def test_a_root_that_cannot_be_changed_is_refused(tmp_path: Path) -> None:
    ckptfmt.save({"a": 1}, tmp_path)
    for root in (5, (1,), "text", None):
        with pytest.raises(ckptfmt.InvalidInput, match="cannot be changed in place"):
            ckptfmt.restore(root, tmp_path)


# -- nothing changed after a failure ------------------------------------------------------------------------
CHUNK = 8 << 20


def large(value: float) -> dict[str, Any]:
    """Several chunks in one pack, a strided and a cast-free tensor, an object and plain values."""
    return {
        "big": torch.full((5 << 20,), value),
        "strided": torch.full((4, 3), value).t(),
        "numpy": np.full(1000, value),
        "object": Counting(int(value)),
        "n": value,
        "list": [value],
        "small": torch.full((3,), value),
    }


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository whose pack has one wrong bit in the last chunk of ``big``."""
    place: Path = tmp_path_factory.mktemp("damaged")
    generation = ckptfmt.save(large(1.0), place)
    (pack,) = packs(generation)
    assert generation["big"].nbytes > 2 * CHUNK
    flip(pack, data_start(pack) + generation["big"].nbytes - 5)
    return place


def test_nothing_is_changed_when_the_last_chunk_is_damaged(damaged: Path) -> None:
    live = large(0.0)
    before = exact(live)
    with pytest.raises(ckptfmt.Corrupt) as caught:
        ckptfmt.restore(live, damaged)
    assert exact(live) == before
    assert caught.value.tensor == "big"
    assert caught.value.object is not None
    assert caught.value.object.endswith(".safetensors")
    assert caught.value.offset is not None
    assert caught.value.offset > 2 * CHUNK
    with ckptfmt.open(damaged) as repository, repository.checkpointer() as checkpointer:
        with pytest.raises(ckptfmt.Corrupt):
            checkpointer.restore(live)
        assert exact(live) == before


def test_without_atomic_the_error_says_what_was_changed(damaged: Path) -> None:
    live = large(0.0)
    live = {key: live[key] for key in ("small", "big", "strided", "numpy", "object", "n", "list")}
    with pytest.raises(ckptfmt.Corrupt) as caught:
        ckptfmt.restore(live, damaged, atomic=False)
    (note,) = caught.value.__notes__
    assert note.startswith("already changed: ")
    changed = note.partition(": ")[2].split(", ")
    assert changed == ["small", "big"]
    assert live["small"].tolist() == [1.0] * 3
    assert not live["strided"].any()
    assert live["big"][-(4 << 18) :].abs().sum() == 0, "the damaged chunk itself was not copied"
    assert (live["n"], live["object"].n) == (0.0, 0)


def test_without_atomic_a_sound_generation_restores_everything(tmp_path: Path) -> None:
    saved = large(3.0)
    saved["sharded"] = ckptfmt.Sharded(torch.arange(6.0).view(3, 2), (3, 2), (0, 0))
    ckptfmt.save(saved, tmp_path)
    live = large(0.0)
    live["sharded"] = ckptfmt.Sharded(torch.zeros(1, 2), (3, 2), (2, 0))
    live["small"] = live["small"].double()
    report = ckptfmt.restore(live, tmp_path, atomic=False, cast=True)
    assert report.cast == ("small",)
    assert live["small"].tolist() == [3.0] * 3
    assert live["sharded"].local.tolist() == [[4.0, 5.0]]
    rest = ("big", "strided", "numpy", "object", "n", "list")
    assert exact({key: live[key] for key in rest}) == exact({key: saved[key] for key in rest})


def test_refusals_of_objects_come_before_any_change(tmp_path: Path) -> None:
    """An Rng or optimizer that would refuse its state is asked first."""
    torch.manual_seed(0)
    ckptfmt.save({"w": torch.ones(2), "rng": ckptfmt.Rng({"g": np.random.default_rng(0)})}, tmp_path)
    live = {"w": torch.zeros(2), "rng": ckptfmt.Rng({"other": np.random.default_rng(0)})}
    drawn = copy.deepcopy(np.random.get_state()[1])
    with pytest.raises(ckptfmt.Mismatch, match=r"rng: generators\.g"):
        ckptfmt.restore(live, tmp_path)
    assert live["w"].tolist() == [0.0, 0.0]  # type: ignore[union-attr]
    assert np.array_equal(np.random.get_state()[1], drawn)


def test_autograd_notices_a_restore(tmp_path: Path) -> None:
    model = small_model(1)
    ckptfmt.save({"model": model}, tmp_path)
    for atomic in (True, False):
        output = model(torch.randn(4, 6)).sum()
        ckptfmt.restore({"model": model}, tmp_path, atomic=atomic)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.backward()  # the graph was built over values that are gone
