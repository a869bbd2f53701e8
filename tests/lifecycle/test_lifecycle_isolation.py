"""What ``save`` froze is what is stored, whatever the caller does next; and the memory it takes."""

from __future__ import annotations

import hashlib
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lifecycle_rig import Place, assert_state, run_child, state_of

import ckptfmt
from ckptfmt.engine import arena
from ckptfmt.engine.save.snapshot import Snapshot
from ckptfmt.errors import OutOfSpace, UnsupportedValue
from ckptfmt.testing.faults import Fault


def _live_state() -> dict[str, Any]:
    torch.manual_seed(5)
    model = torch.nn.Linear(40, 30)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 40)).sum().backward()
    optimizer.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "half": torch.randn(1000).to(torch.bfloat16),
        "strided": torch.arange(60.0).reshape(6, 10).t(),
        "array": np.arange(3000.0),
        "buffer": bytearray(b"x" * 100_000),
        "list": [1, [2, {"deep": [3]}]],
        "table": {"a": {"b": 1}},
        "set": {1, 2},
    }


def _digest(value: Any) -> str:
    """Of everything in a state, bit by bit."""
    found = hashlib.sha256()

    def walk(item: Any) -> None:
        if isinstance(item, torch.Tensor):
            found.update(f"{item.dtype}{tuple(item.shape)}".encode())
            found.update(item.detach().contiguous().view(torch.uint8).numpy().tobytes() if item.ndim else b"")
            found.update(repr(item.item()).encode() if not item.ndim else b"")
        elif isinstance(item, np.ndarray):
            found.update(item.tobytes())
        elif isinstance(item, dict):
            for key, one in item.items():
                found.update(repr(key).encode())
                walk(one)
        elif isinstance(item, list | tuple):
            for one in item:
                walk(one)
        else:
            found.update(repr(bytes(item) if isinstance(item, bytearray) else item).encode())

    walk(value)
    return found.hexdigest()


def _flat(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "model": dict(state["model"].state_dict()), "optimizer": state["optimizer"].state_dict()["state"]}


def _ruin(state: dict[str, Any], metadata: dict[str, Any]) -> None:
    with torch.no_grad():
        for parameter in state["model"].parameters():
            parameter.fill_(-1)
        for slots in state["optimizer"].state.values():
            for slot in slots.values():
                slot.fill_(-1)
        state["half"].zero_()
        state["strided"].zero_()
    state["array"][:] = -1
    state["buffer"][:] = b"y" * 100_000
    state["list"][1][1]["deep"].append("later")
    state["list"].append("later")
    state["table"]["a"]["b"] = "later"
    state["set"].add("later")
    metadata["notes"].append("later")
    metadata["loss"] = -1.0


def test_changes_after_save_returns_do_not_reach_storage(place: Place) -> None:
    process = place.open(Fault(op="write_at", delay=0.3, times=None))
    state, metadata = _live_state(), {"loss": 0.5, "notes": ["first"]}
    wanted = _digest(_flat(state))
    with process.checkpointer() as checkpointer:
        pending = checkpointer.save(state, step=1, metadata=metadata)
        assert pending is not None
        assert not pending.done()
        _ruin(state, metadata)
        assert not pending.done()
        generation = pending.result()
    assert generation.metadata == {"loss": 0.5, "notes": ["first"]}
    fresh = _live_state()
    with torch.no_grad():
        for parameter in fresh["model"].parameters():
            parameter.zero_()
    generation.restore(fresh)
    assert _digest(_flat(fresh)) == wanted


def test_the_memory_of_a_snapshot_is_free_when_callbacks_run(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    process = place.open()
    made: list[weakref.ref[Snapshot]] = []
    take = Snapshot.__init__

    def remember(self: Snapshot, *args: Any) -> None:
        take(self, *args)
        made.append(weakref.ref(self))

    monkeypatch.setattr(Snapshot, "__init__", remember)
    alive: list[bool] = []
    with process.checkpointer() as checkpointer:
        pending = checkpointer.save(state_of(1), step=1)
        assert pending is not None
        pending.add_done_callback(lambda done: alive.append(made[0]() is not None))
        pending.result()
    assert alive == [False]


def test_a_state_larger_than_free_memory_is_refused_before_anything(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = place.open()
    state = state_of(1)
    with process.checkpointer() as checkpointer:
        monkeypatch.setattr(arena, "available_memory", lambda: 50_000)
        with pytest.raises(OutOfSpace, match="host memory") as caught:
            checkpointer.save(state, step=1)
        assert caught.value.free == 50_000
        assert caught.value.needed is not None
        assert caught.value.needed > 90_000
        assert not process.rows()
        assert not checkpointer.in_flight
        assert_state(state, 1)
        monkeypatch.undo()
        checkpointer.save(state, step=1)
    assert_state(process.repository.latest().load(), 1)


def test_a_value_that_cannot_be_stored_leaves_no_trace(place: Place) -> None:
    process = place.open()
    with process.checkpointer() as checkpointer:
        with pytest.raises(UnsupportedValue, match=r"bad\.deep"):
            checkpointer.save({"w": np.ones(3), "bad": {"deep": lambda: None}}, step=1)
        assert not process.rows()
        pending = checkpointer.save(state_of(2), step=2)
        assert pending is not None
        assert pending.result().step == 2


_GROWTH = """
import gc, sys
import numpy as np
import ckptfmt

def rss():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

state = {f"t{i}": np.ones(1_875_000, dtype=np.float32) for i in range(8)}  # 60 MB
sizes = []
with ckptfmt.open(sys.argv[1]) as repository, repository.checkpointer() as checkpointer:
    for step in range(12):
        checkpointer.save(state, step=step)
        checkpointer.wait()
        gc.collect()
        sizes.append(rss())
print(sizes[2], sizes[-1])
"""


@pytest.mark.slow
def test_host_memory_does_not_grow_with_the_number_of_saves(root: Path) -> None:
    status, out, err = run_child(_GROWTH, root, timeout=120)
    assert status == 0, err
    early, late = map(int, out.split())
    assert late <= early * 1.05, f"{early} -> {late}"


_FORKED = """
import sys, time, statistics, warnings
import numpy as np, torch
from torch.utils.data import DataLoader, Dataset
import ckptfmt
from ckptfmt.engine.save.snapshot import Snapshot

class Numbers(Dataset):
    def __len__(self): return 1000
    def __getitem__(self, i): return torch.full((64,), float(i))

state = {f"t{i}": np.ones(1_000_000, dtype=np.float32) for i in range(8)}  # 32 MB

def stalls(checkpointer, first, count):
    found = []
    for step in range(first, first + count):
        pending = checkpointer.save(state, step=step)
        found.append(pending.stall_seconds)
        pending.result()
    return found

with ckptfmt.open(sys.argv[1]) as repository, repository.checkpointer() as checkpointer:
    stalls(checkpointer, 0, 2)  # the arena is touched
    alone = statistics.median(stalls(checkpointer, 10, 4))
    forked = []
    for step in range(100, 103):
        pending = checkpointer.save(state, step=step)
        loader = DataLoader(Numbers(), batch_size=250, num_workers=2, multiprocessing_context="fork")
        total = sum(float(batch.sum()) for batch in loader)  # workers are forked while the save is in flight
        assert total == 64 * sum(range(1000))
        pending.result()
        forked += stalls(checkpointer, step * 10, 1)  # the first one after the fork
    import ctypes
    checkpointer.wait()
    begin = ctypes.addressof(ctypes.c_char.from_buffer(checkpointer._flights.idle_arena().view(0, 1)))
    flags, inside = "", False
    for line in open("/proc/self/smaps"):
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            low, high = (int(part, 16) for part in head.split("-"))
            inside = low <= begin < high
        elif inside and line.startswith("VmFlags:"):
            flags = line.split(":", 1)[1]
    print(alone, statistics.median(forked), "dc" in flags.split())
"""


@pytest.mark.slow
def test_forked_data_loader_workers_neither_break_a_save_nor_slow_the_next(root: Path) -> None:
    status, out, err = run_child(_FORKED, root, timeout=120)
    assert status == 0, err
    alone, forked, excluded = out.split()
    assert excluded == "True"  # the arena is not copied into children: no copy-on-write faults
    assert float(forked) <= 1.5 * float(alone) + 0.02, (alone, forked)
    with ckptfmt.open(root, mode="r") as repository:
        assert len(repository.generations()) == 12
        assert repository.latest().verify().ok


def test_a_second_reader_sees_each_stage_of_the_handle(place: Place) -> None:
    process = place.open()
    with process.checkpointer() as checkpointer:
        pending = checkpointer.save(state_of(1), step=1)
        assert pending is not None
        pending.wait("frozen")
        pending.wait("staged")
        pending.wait("durable")
        pending.wait()
        assert (pending.stage, pending.done(), pending.exception()) == ("committed", True, None)
        assert pending.generation_id == process.row().id
        assert checkpointer.last_committed is not None
        assert checkpointer.last_committed.id == pending.generation_id
