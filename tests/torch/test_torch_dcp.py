"""GenerationWriter and GenerationReader under torch.distributed.checkpoint, in one process.

The scenarios are those of torch's own tests of its storages (test/distributed/checkpoint), as spec/dcp.md lists them.
"""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import socket
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as helpers
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlanner, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import ckptfmt
from ckptfmt.errors import Corrupt, InvalidInput, Mismatch, NotFound, UnsupportedValue
from ckptfmt.torch.dcp import GenerationReader, GenerationWriter

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package"),
    pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)"),
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 1)
        self.bag = nn.EmbeddingBag(5, 10)


class Held:
    """A Stateful: DCP calls it at the top of a state."""

    def __init__(self, value: Any) -> None:
        self.state = {"value": value}
        self.loads = 0

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state
        self.loads += 1


def cause(error: CheckpointException, rank: int = 0) -> BaseException:
    """What happened on ``rank``."""
    return error.failures[rank][0]


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and one == other


# -- saved and loaded -----------------------------------------------------------------------------------
def test_a_module(root: Path, writer: GenerationWriter) -> None:
    saved, into = Net().state_dict(), Net().state_dict()
    assert not equal(saved, into)
    dcp.save(saved, storage_writer=writer, no_dist=True)
    addresses = [value.data_ptr() for value in into.values()]
    dcp.load(into, storage_reader=GenerationReader(root), no_dist=True)
    assert equal(saved, into)
    assert addresses == [value.data_ptr() for value in into.values()]


def test_a_module_and_its_optimizer_by_torchs_helpers(root: Path, writer: GenerationWriter) -> None:
    """In place, and plain values too: the learning rate."""

    def made(lr: float) -> tuple[nn.Module, torch.optim.Optimizer]:
        net = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
        optimizer = torch.optim.Adam(net.parameters(), lr=lr)
        net(torch.rand(2, 8)).sum().backward()
        optimizer.step()
        return net, optimizer

    net, optimizer = made(0.1)
    state = {"model": helpers.get_model_state_dict(net), "optimizer": helpers.get_optimizer_state_dict(net, optimizer)}
    dcp.save(state, storage_writer=writer)
    net, optimizer = made(0.2)
    models, optimizers = helpers.get_model_state_dict(net), helpers.get_optimizer_state_dict(net, optimizer)
    into = {"model": models, "optimizer": optimizers}
    dcp.load(into, storage_reader=GenerationReader(root))
    assert into["model"] is models
    assert into["optimizer"] is optimizers
    helpers.set_state_dict(net, optimizer, model_state_dict=models, optim_state_dict=optimizers)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert equal(dict(state["model"]), dict(models))
    assert equal(state["optimizer"], optimizers)


def test_values_of_all_kinds_without_pickle(root: Path, writer: GenerationWriter, monkeypatch: Any) -> None:
    state: dict[str, Any] = {
        "number": 3,
        "text": "x",
        "list": [1, "two", (3.0, None)],
        "nested": {"deep": [{"a": 1}, [torch.arange(3), {"b": 2}]], 7: "seven"},
        "pair": (torch.ones(2), 1),
        "bytes": bytes(100_000),
        "file": io.BytesIO(b"inside"),
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "nothing": None,
    }

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("pickled")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", refuse)
        dcp.save(state, storage_writer=writer)
    into = copy.deepcopy(state) | {"number": 0, "text": "", "list": [], "bytes": b"", "file": None, "pair": None}
    into["nested"]["deep"][1][0].zero_()
    into["nested"]["deep"][0]["a"] = 0
    dcp.load(into, storage_reader=GenerationReader(root))
    assert into.pop("file").getvalue() == b"inside"
    into["nested"].pop("7")  # DCP knows keys as texts only
    assert equal({key: value for key, value in state.items() if key != "file"}, into)
    # The same by ckptfmt, whose tree has the keys that DCP gave them.
    found = ckptfmt.load(root)
    assert found["file"] == b"inside"
    assert found["nested"]["deep"][1][1] == {"b": 2}
    assert equal(found["pair"], state["pair"])
    monkeypatch.setattr(torch, "save", refuse)
    with pytest.raises(CheckpointException, match="pickled"):
        dcp.save({"a": 1}, storage_writer=dcp.FileSystemWriter(root.parent / "torchs"))


def test_stateful_objects_are_loaded_in_place_and_others_replaced(root: Path, writer: GenerationWriter) -> None:
    held = Held(torch.arange(4))
    dcp.save({"held": held, "plain": {"t": torch.ones(2), "l": [1, 2]}}, storage_writer=writer)
    other = Held(torch.zeros(4, dtype=torch.int64))
    into = {"held": other, "plain": {"t": torch.zeros(2), "l": []}}
    dcp.load(into, storage_reader=GenerationReader(root))
    assert into["held"] is other
    assert other.loads == 1
    assert equal(other.state, held.state)
    assert equal(into["plain"], {"t": torch.ones(2), "l": [1, 2]})


def test_an_empty_state(root: Path, writer: GenerationWriter) -> None:
    dcp.save({}, storage_writer=writer)
    dcp.load({}, storage_reader=GenerationReader(root))


@pytest.mark.parametrize("atomic", [True, False])
def test_tensors_of_odd_kinds(root: Path, writer: GenerationWriter, atomic: bool) -> None:
    state = {
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "strided": torch.arange(24).reshape(4, 6).t(),
        "half": torch.randn(7, 3).bfloat16(),
        "eighth": torch.randn(9).to(torch.float8_e4m3fn),
        "flag": torch.tensor([True, False]),
        "complex": torch.randn(3, dtype=torch.complex64).conj(),
        "grad": torch.ones(2, requires_grad=True),
        "parameter": nn.Parameter(torch.ones(3)),
    }
    dcp.save(state, storage_writer=writer)
    into = {name: torch.zeros(value.shape).to(value.dtype) for name, value in state.items()}
    into["strided"] = torch.zeros(12, 8, dtype=torch.int64)[::2, ::2]
    dcp.load(into, storage_reader=GenerationReader(root, atomic=atomic))
    for name, value in state.items():
        assert torch.equal(into[name].to(torch.complex64), value.detach().to(torch.complex64)), name


def test_a_load_casts_as_torch_does(root: Path, writer: GenerationWriter) -> None:
    value = torch.rand(4, 3)
    dcp.save({"w": value}, storage_writer=writer)
    into = {"w": torch.zeros(4, 3, dtype=torch.bfloat16)}
    dcp.load(into, storage_reader=GenerationReader(root))
    assert torch.equal(into["w"], value.bfloat16())


# -- generations -----------------------------------------------------------------------------------------
def test_saves_of_one_writer_are_one_launch_and_each_is_committed(root: Path) -> None:
    with GenerationWriter(f"{root}#llama@step:5", metadata={"loss": 1.5}, tags=["first"]) as writer:
        dcp.save({"w": torch.ones(3)}, storage_writer=writer)
        first = writer.generation
        assert first is not None
        assert (first.run, first.step, first.metadata, first.world_size) == ("llama", 5, {"loss": 1.5}, 1)
        assert first.verify().ok
        writer.tags = ()
        for checkpoint_id in (6, "7", "step:8", f"{root}#llama@step:9"):
            dcp.save({"w": torch.full((3,), 2.0)}, storage_writer=writer, checkpoint_id=checkpoint_id)
        last = writer.generation
        assert last is not None
    with ckptfmt.open(root, mode="r") as repository:
        infos = sorted(repository.generations(run="llama"), key=lambda info: info.id)
    assert [info.step for info in infos] == [5, 6, 7, 8, 9]
    assert [info.parent_key for info in infos[1:]] == [info.key for info in infos[:-1]]
    for at, wanted in ((None, 2.0), ("step:5", 1.0), ("tag:first", 1.0), (first.id, 1.0)):
        into = {"w": torch.zeros(3)}
        dcp.load(into, storage_reader=GenerationReader(root, run="llama", at=at))
        assert into["w"][0] == wanted
    into = {"w": torch.zeros(3)}
    reader = GenerationReader(root, run="llama")
    dcp.load(into, storage_reader=reader, checkpoint_id="step:5")
    assert into["w"][0] == 1.0
    about = reader.read_metadata().storage_meta
    assert about is not None
    assert (about.checkpoint_id, about.save_id) == (f"{root}#llama@step:5", first.key)
    assert about.load_id == reader.load_id
    assert GenerationWriter.validate_checkpoint_id(f"{root}#llama")
    assert not GenerationReader.validate_checkpoint_id(root)


def test_what_a_checkpointer_saved_is_loaded_by_dcp(root: Path) -> None:
    net = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.5)
    net(torch.rand(1, 4)).sum().backward()
    optimizer.step()
    ckptfmt.save({"model": net, "optimizer": optimizer, "epoch": 3, "tied": [net.weight, net.weight]}, root)
    into = {"model": nn.Linear(4, 4).state_dict(), "epoch": 0, "tied": [torch.zeros(4, 4), torch.zeros(4, 4)]}
    dcp.load(into, storage_reader=GenerationReader(root), planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    assert equal(dict(net.state_dict()), dict(into["model"]))
    assert into["epoch"] == 3
    assert torch.equal(into["tied"][1], net.weight)


def test_what_dcp_saved_is_restored_by_ckptfmt(root: Path, writer: GenerationWriter) -> None:
    net, other = Net(), Net()
    dcp.save({"model": net, "epoch": 3}, storage_writer=writer)
    state = {"model": other, "epoch": 0}
    ckptfmt.restore(state, root)
    assert state["epoch"] == 3
    assert equal(dict(net.state_dict()), dict(other.state_dict()))


def test_a_chosen_part(root: Path, writer: GenerationWriter) -> None:
    dcp.save({"model": {"w": torch.ones(2), "b": torch.ones(1)}, "optimizer": {"lr": 0.5}}, storage_writer=writer)
    found = _load_state_dict_from_keys("model", storage_reader=GenerationReader(root))
    assert equal(found, {"model": {"w": torch.ones(2), "b": torch.ones(1)}})
    found = _load_state_dict_from_keys({"model.w", "optimizer"}, storage_reader=GenerationReader(root))
    assert equal(found, {"model": {"w": torch.ones(2)}, "optimizer": {"lr": 0.5}})
    into: dict[str, Any] = {"model": {"w": torch.zeros(2), "more": torch.zeros(1)}}
    with pytest.raises(CheckpointException, match=r"Missing key.*model\.more"):
        dcp.load(into, storage_reader=GenerationReader(root))
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(into, storage_reader=GenerationReader(root), planner=planner)
    assert torch.equal(into["model"]["w"], torch.ones(2))


# -- planners --------------------------------------------------------------------------------------------
def test_planners_that_do_not_flatten(root: Path, writer: GenerationWriter) -> None:
    state = {"w": torch.ones(2), "group": {"lr": 0.1, "list": [torch.arange(2), {"x": 1}]}}
    dcp.save(state, storage_writer=writer, planner=dcp.DefaultSavePlanner(flatten_state_dict=False))
    into: dict[str, Any] = {"w": torch.zeros(2), "group": {}}
    # With flatten_sharded_tensors the planner puts values into a copy, whatever the storage.
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    reader = GenerationReader(root)
    assert list(reader.read_metadata().state_dict_metadata) == ["w", "group"]
    dcp.load(into, storage_reader=reader, planner=planner)
    assert equal(into, state)
    assert equal(ckptfmt.load(root), state)


def test_plans_that_are_cached(root: Path, writer: GenerationWriter) -> None:
    cached = ("save_plan", "all_plans", "global_plan", "metadata", "final_save_plan")
    try:
        for value in (1.0, 2.0, 3.0):
            shape = 3 if value == 3.0 else 2
            planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
            dcp.save({"w": torch.full((shape,), value), "n": value}, storage_writer=writer, planner=planner)
            into = {"w": torch.zeros(shape), "n": 0}
            dcp.load(into, storage_reader=GenerationReader(root))
            assert equal(into, {"w": torch.full((shape,), value), "n": value})
    finally:
        for name in cached:
            getattr(SavePlanner, f"_cached_{name}").clear()


class Sealed(dcp.DefaultSavePlanner):
    """Makes bytes of its own of every value."""

    def resolve_data(self, write_item: Any) -> Any:
        if write_item.type is WriteItemType.BYTE_IO:
            return io.BytesIO(f"sealed {self.lookup_object(write_item.index)}".encode())
        return super().resolve_data(write_item)


class Opener(dcp.DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = value.read()


def test_a_planners_own_bytes_come_back_as_they_were(root: Path, writer: GenerationWriter) -> None:
    dcp.save({"w": torch.ones(2), "n": 5}, storage_writer=writer, planner=Sealed())
    into: dict[str, Any] = {"w": torch.zeros(2), "n": None}
    dcp.load(into, storage_reader=GenerationReader(root), planner=Opener())
    assert into["n"] == b"sealed 5"


class Halves(dcp.DefaultSavePlanner):
    """Stores other tensors than the state has."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        return object.half() if isinstance(object, torch.Tensor) else super().transform_object(write_item, object)


class Doubles(dcp.DefaultLoadPlanner):
    """Loads into tensors of its own, and hands them on when they are filled."""

    def transform_tensor(self, read_item: Any, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(super().transform_tensor(read_item, tensor))

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        self.lookup_tensor(read_item.dest_index).copy_(2 * tensor)


def test_planners_that_transform(root: Path, writer: GenerationWriter) -> None:
    dcp.save({"w": torch.full((2,), 1.5)}, storage_writer=writer, planner=Halves())
    assert ckptfmt.load(root)["w"].dtype == torch.float16
    into = {"w": torch.zeros(2)}
    dcp.load(into, storage_reader=GenerationReader(root), planner=Doubles())
    assert torch.equal(into["w"], torch.full((2,), 3.0))


# -- refusals and damage ---------------------------------------------------------------------------------
def test_what_cannot_be_stored_is_named(root: Path, writer: GenerationWriter) -> None:
    for value, words in ((object(), "value at 'a.b'"), (nn.Linear(1, 1), r"a\.b: .*live object"), ([Held(1)], "a.b")):
        with pytest.raises(CheckpointException) as caught:
            dcp.save({"a": {"b": value}, "w": torch.ones(2)}, storage_writer=writer)
        assert isinstance(cause(caught.value), UnsupportedValue)
        with pytest.raises(UnsupportedValue, match=words):
            raise cause(caught.value)
    dcp.save({"w": torch.ones(2)}, storage_writer=writer)
    with ckptfmt.open(root, mode="r") as repository:
        assert len(repository.generations(run="default")) == 1


def test_one_checkpoint_per_rank_is_refused(root: Path, writer: GenerationWriter) -> None:
    with pytest.raises(InvalidInput, match="use_collectives=False would make one checkpoint per rank"):
        dcp.save({"w": torch.ones(2)}, storage_writer=writer, use_collectives=False)
    with pytest.raises(InvalidInput, match="name its step"):
        writer.reset(f"{root}#default@41")


def test_a_load_of_nothing_says_what_is_missing(root: Path) -> None:
    with pytest.raises(CheckpointException, match="nothing was ever saved"):
        dcp.load({"w": torch.ones(2)}, storage_reader=GenerationReader(root))
    with pytest.raises(NotFound):
        GenerationReader(root / "absent").read_metadata()


@pytest.mark.parametrize("atomic", [True, False])
def test_a_damaged_chunk_is_named_and_nothing_is_loaded_of_it(
    root: Path, writer: GenerationWriter, atomic: bool
) -> None:
    dcp.save({"a": torch.ones(2), "w": torch.ones(5000)}, storage_writer=writer)
    (pack,) = root.rglob("*.safetensors")
    pack.chmod(0o600)
    with pack.open("r+b") as file:
        file.seek(-300, os.SEEK_END)
        file.write(b"!")
    into = {"a": torch.zeros(2), "w": torch.zeros(5000)}
    with pytest.raises(CheckpointException) as caught:
        dcp.load(into, storage_reader=GenerationReader(root, atomic=atomic))
    error = cause(caught.value)
    assert isinstance(error, Corrupt)
    assert error.tensor in ("w", "a")
    if atomic:
        assert not into["a"].any()
    assert not into["w"].any()


def test_other_shapes_and_places_that_cannot_be_filled(root: Path, writer: GenerationWriter) -> None:
    dcp.save({"w": torch.ones(2)}, storage_writer=writer)
    with pytest.raises(CheckpointException, match="Size mismatch"):
        dcp.load({"w": torch.zeros(3)}, storage_reader=GenerationReader(root))
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"w": torch.zeros(1).expand(2)}, storage_reader=GenerationReader(root))
    assert isinstance(cause(caught.value), Mismatch)


def test_a_state_with_two_places_of_one_name(root: Path) -> None:
    ckptfmt.save({"a.b": 1, "a": {"b": 2}}, root)
    with pytest.raises(Mismatch, match=r"are both 'a\.b' to DCP"):
        GenerationReader(root).read_metadata()


# -- async_save ------------------------------------------------------------------------------------------
def test_async_save_freezes_the_state(root: Path, writer: GenerationWriter) -> None:
    weight, counts = torch.arange(1000.0), [1, 2]
    view = torch.arange(12).reshape(3, 4)[:, 1:]
    futures = []
    for step in range(3):
        state = {"w": weight, "tied": weight, "view": view, "counts": counts, "scalar": torch.tensor(step)}
        futures.append((step, dcp.async_save(state, storage_writer=writer, checkpoint_id=step)))
        weight += 1
        counts.append(step)
        futures[-1][1].result(60)
    for step, _ in futures:
        found = ckptfmt.load(root, at=f"step:{step}")
        assert torch.equal(found["w"], torch.arange(1000.0) + step)
        assert torch.equal(found["view"], view)
        assert found["tied"] is found["w"]
        assert found["counts"] == [1, 2, *range(step)]
        assert found["scalar"] == step


def test_staging_uses_its_memory_again(writer: GenerationWriter) -> None:
    assert writer.stage({}) == {}
    first = writer.stage({"w": torch.ones(1 << 20), "tied": [torch.ones(3)]})
    address = first["w"].data_ptr()
    beside = writer.stage({"w": torch.zeros(1 << 20)})
    assert beside["w"].data_ptr() != address
    assert first["w"].all()
    del first
    again = writer.stage({"w": torch.zeros(1 << 20)})
    assert again["w"].data_ptr() == address


def test_what_is_staged_is_frozen_before_it_is_read(writer: GenerationWriter) -> None:
    weight, half, counts = torch.arange(1000.0), torch.ones(2, 3, dtype=torch.bfloat16), [1, [2]]
    state: dict[str, Any] = {
        "w": weight,
        "deep": {"tied": weight, "pair": (half, 3), "empty": torch.empty(0, 4)},
        "counts": counts,
        "when": Counter("aab"),
    }
    staged = writer.stage(state)
    weight += 1
    half.data = torch.zeros(5)
    counts[1].append(7)  # type: ignore[attr-defined]
    state["when"].clear()
    state["deep"]["pair"] = state["more"] = None
    assert list(staged) == ["w", "deep", "counts", "when"]
    assert len(staged) == 4
    assert torch.equal(staged["w"], torch.arange(1000.0))
    assert staged["deep"]["tied"].data_ptr() == staged["w"].data_ptr()
    kept, number = staged["deep"]["pair"]
    assert torch.equal(kept, torch.ones(2, 3, dtype=torch.bfloat16))
    assert number == 3
    assert staged["deep"]["empty"].shape == (0, 4)
    assert staged["counts"] == [1, [2]]
    assert staged["when"] == Counter("aab")


def test_what_is_staged_is_one_state_to_all_readers_and_a_dict_elsewhere(writer: GenerationWriter) -> None:
    staged = writer.stage({"w": torch.ones(3), "deep": {"step": 1}})
    with ThreadPoolExecutor(4) as pool:
        found = [each.result(60) for each in [pool.submit(lambda: staged["w"]) for _ in range(4)]]
    assert all(each is staged["w"] for each in found)
    sent = pickle.loads(pickle.dumps(staged))
    assert type(sent) is dict
    assert torch.equal(sent.pop("w"), torch.ones(3))
    assert sent == {"deep": {"step": 1}}


def test_tensors_are_made_when_what_is_staged_is_read(writer: GenerationWriter) -> None:
    def alive() -> int:
        return sum(
            type(each) is torch.Tensor and not each.is_nested and each.shape == (3, 5, 11, 2)
            for each in gc.get_objects()
        )

    state = {str(number): torch.ones(3, 5, 11, 2) for number in range(20)}
    before = alive()
    staged = writer.stage(state)
    assert alive() == before
    assert all(tensor.all() for tensor in staged.values())
    assert alive() == before + 20


def test_what_is_staged_and_never_read_gives_its_memory_back(writer: GenerationWriter) -> None:
    address = writer.stage({"w": torch.ones(1 << 20)})["w"].data_ptr()  # nobody has it any more
    assert writer.stage({"w": torch.zeros(1 << 20)}) is not None
    again = writer.stage({"w": torch.ones(1 << 20)})["w"]
    assert again.data_ptr() == address


def test_a_failed_async_save_tells_its_future(root: Path, writer: GenerationWriter) -> None:
    future = dcp.async_save({"w": torch.ones(2), "bad": Sealed}, storage_writer=writer)
    with pytest.raises(CheckpointException, match="bad"):
        future.result(60)
    dcp.async_save({"w": torch.ones(2)}, storage_writer=writer).result(60)
    assert list(ckptfmt.load(root)) == ["w"]


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one rank."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture
def end_process() -> Iterator[Callable[[], None]]:
    """Ends the process in which DCP saves, whose life is that of this one."""
    from torch.distributed.checkpoint import _async_process_executor as executor

    def end() -> None:
        process = executor._CHECKPOINT_PROCESS
        if process is not None:
            process._send(executor._CheckpointSaveProcessControlOpts.TERMINATE)
            process._save_process.join(30)
            process._process_pipe.close()
            executor._CHECKPOINT_PROCESS = None

    yield end
    end()


@pytest.mark.slow
def test_async_save_in_a_process(
    root: Path, alone: None, end_process: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    weight = torch.arange(1000.0)
    with GenerationWriter(root, run="run") as writer, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in (1, 2):
            future = dcp.async_save(
                {"w": weight, "step": step},
                storage_writer=writer,
                checkpoint_id=step,
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            )
            weight += 1
            future.result(120)
        end_process()
    for step in (1, 2):
        found = ckptfmt.load(root, at=f"step:{step}")
        assert found["step"] == step
        assert torch.equal(found["w"], torch.arange(1000.0) + step - 1)
    with ckptfmt.open(root, mode="r") as repository:
        infos = sorted(repository.generations(run="run"), key=lambda info: info.id)
    assert infos[1].parent_key == infos[0].key  # one launch
