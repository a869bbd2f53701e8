"""Saves that hold less than the state in host memory: staged (``host_bytes_max``) and partial (``sync``)."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from error_chain import chain_of
from lifecycle_rig import Place, assert_state, ended, run_child, set_commit_timeout, state_of

import ckptfmt
from ckptfmt.engine import plan as plans
from ckptfmt.engine import units
from ckptfmt.errors import BackendError, InvalidInput, SaveFailed, Unavailable
from ckptfmt.format import checksum
from ckptfmt.testing.catalog_faults import unreachable
from ckptfmt.testing.faults import Fault

UNIT: Final = 1 << 16
WINDOW: Final = 8 * UNIT
LARGE: Final = 200_000
"""Numbers in a tensor that is three windows long."""

MODES: Final = {
    "staged": ({"host_bytes_max": WINDOW}, None),
    "partial": ({}, ["w", "*.exp_avg_sq"]),
    "all of it partial": ({}, "*"),
    "both": ({"host_bytes_max": WINDOW + UNIT}, "w"),
    "two in flight": ({"host_bytes_max": 2 * WINDOW, "in_flight_max": 2}, "blob"),
}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that is 8 MiB elsewhere is 64 KiB."""
    monkeypatch.setattr(units, "IO_BYTES", UNIT)
    monkeypatch.setattr(checksum, "CHUNK_BYTES", UNIT)
    monkeypatch.setattr(plans, "WINDOW_BYTES", WINDOW)
    monkeypatch.setattr(plans, "HOST_BYTES_MIN", WINDOW)


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> tuple[dict[str, Any], Any]:
    return MODES[request.param]


def training_state(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.BatchNorm1d(200), torch.nn.Linear(200, 300))
    model[2].weight = torch.nn.Parameter(model[0].weight.detach().t())  # strided, and of the first layer's memory
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, 300)).sum().backward()
    optimizer.step()
    tied = torch.randn(70, 50)
    return {
        "model": model,
        "optimizer": optimizer,
        **state_of(seed, LARGE),
        "strided": torch.randn(400, 300)[:, ::3].t(),
        "empty": np.zeros((0, 7)),
        "scalar": torch.tensor(seed + 0.5),
        "tied": [tied, tied],
        "own": ckptfmt.PerRank(np.arange(30_000) * seed),
    }


def plain(state: dict[str, Any]) -> dict[str, Any]:
    """Copies of everything."""
    found = {name: tensor.clone() for name, tensor in state["model"].state_dict().items()}
    for number, slots in state["optimizer"].state_dict()["state"].items():
        found |= {f"{number}.{name}": tensor.clone() for name, tensor in slots.items()}
    found |= {name: state[name].clone() for name in ("strided", "scalar")} | {"tied": state["tied"][0].clone()}
    found |= {name: torch.from_numpy(state[name].copy()) for name in ("w", "b", "empty")}
    return found | {"own": torch.from_numpy(state["own"].value.copy()), "blob": state["blob"], "step": state["step"]}


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return list(left) == list(right) and all(
        torch.equal(value, right[name]) if isinstance(value, torch.Tensor) else value == right[name]
        for name, value in left.items()
    )


def ruin(state: dict[str, Any]) -> None:
    with torch.no_grad():
        for tensor in (*state["model"].parameters(), *state["model"].buffers(), state["strided"], state["tied"][0]):
            tensor.fill_(7)
        for slots in state["optimizer"].state.values():
            for tensor in slots.values():
                tensor.fill_(7)
    for array in (state["w"], state["b"], state["own"].value):
        array[...] = 7


def save(checkpointer: Any, state: Any, step: int, sync: Any) -> ckptfmt.PendingSave:
    pending = checkpointer.save(state, step=step, sync=sync)
    assert pending is not None
    return pending


def check_round_trip(checkpointer: Any, sync: Any) -> None:
    wanted = []
    for step in (1, 2, 3):
        state = training_state(step)
        wanted.append(plain(state))
        pending = save(checkpointer, state, step, sync if step != 2 else None)
        assert pending.stall_seconds > 0
        ruin(state)
        if step == 3:
            pending.result()
    into = training_state(9)
    for step in (3, 1, 2):
        report = checkpointer.restore(into, at=f"step:{step}")
        assert report.step == step
        assert same(plain(into), wanted[step - 1])


def test_what_is_prepared_is_what_that_save_takes(place: Place) -> None:
    with place.open().checkpointer() as checkpointer:
        taken = []
        for sync in ("*", "w", None):
            state = state_of(1, LARGE)
            checkpointer.prepare(state, sync=sync)
            prepared = checkpointer._flights.idle_arena().nbytes
            save(checkpointer, state, len(taken), sync).result()
            checkpointer.wait()
            assert checkpointer._flights.idle_arena().nbytes == prepared
            taken.append(prepared)
        assert taken[0] <= WINDOW < taken[1] < taken[2]
        with pytest.raises(InvalidInput, match="sync="):
            checkpointer.prepare(state, sync=[""])


def test_what_comes_back_is_what_was_there_when_save_returned(place: Place, mode: tuple[dict[str, Any], Any]) -> None:
    options, sync = mode
    with place.open().checkpointer(**options) as checkpointer:
        check_round_trip(checkpointer, sync)


@pytest.mark.parametrize("name", ["partial", "both"])
def test_the_same_on_a_disk(root: Path, name: str) -> None:
    options, sync = MODES[name]
    with ckptfmt.open(root) as repository:
        with repository.checkpointer(**options) as checkpointer:
            check_round_trip(checkpointer, sync)
        for info in repository.generations():
            assert repository.generation(info.id).verify().ok


def test_any_write_may_fail(place: Place, mode: tuple[dict[str, Any], Any]) -> None:
    """The failure is told once, by ``save`` if it still copies, else on the handle; what was there stays."""
    options, sync = mode
    process = place.open()
    state = state_of(2, LARGE)
    with process.checkpointer(**options) as checkpointer:
        save(checkpointer, state_of(1, LARGE), 1, sync).result()
        writes = process.backend.counts["write_at"]
        for nth in range(1, writes + 1, 4):
            process.backend.add(
                Fault("write_at", nth=process.backend.counts["write_at"] + nth, error=lambda: BackendError("broken"))
            )
            with pytest.raises(SaveFailed) as caught:
                save(checkpointer, state, 1 + nth, sync).result()
            assert any("broken" in str(error) for error in chain_of(caught.value))
            checkpointer.wait()  # has nothing more to tell
            process.backend.heal()
        assert_state(state, 2, LARGE)
        assert_state(process.repository.latest("run").load(), 1, LARGE)
        assert_state(save(checkpointer, state, 1000, sync).result().load(), 2, LARGE)
    assert all(ended(row) for row in process.rows()[1:-1])


@pytest.mark.parametrize("op", ["write_at", "open_writer", "make_folder"])
def test_a_backend_that_hangs_does_not_hang_the_caller(place: Place, op: str) -> None:
    hold = threading.Event()
    process = place.open(Fault(op, hold=hold, times=2))
    with process.checkpointer(host_bytes_max=WINDOW, commit_timeout=0.8) as checkpointer:
        began = time.monotonic()
        with pytest.raises(SaveFailed, match=r"not committed within 0\.8 s"):
            checkpointer.save(state_of(2, LARGE), step=2)
        assert time.monotonic() - began < 5
        process.backend.heal()
        # The writer still hangs, with the memory that it reads.
        set_commit_timeout(checkpointer, 60.0)
        assert_state(save(checkpointer, state_of(3, LARGE), 3, None).result().load(), 3, LARGE)
        hold.set()
    assert_state(process.repository.latest("run").load(), 3, LARGE)


def test_a_save_that_cannot_begin_lets_its_caller_go(place: Place) -> None:
    process = place.open(sql=[Fault("begin_save", error=unreachable, times=None)])
    with process.checkpointer(host_bytes_max=WINDOW, commit_timeout=0.5) as checkpointer:
        with pytest.raises(SaveFailed):
            checkpointer.save(state_of(1, LARGE), step=1)
        assert not checkpointer.in_flight


def test_a_passing_error_costs_the_save_only_if_its_bytes_are_gone(place: Place) -> None:
    process = place.open(Fault("finish", error=lambda: Unavailable("down")))
    with process.checkpointer(host_bytes_max=WINDOW) as checkpointer:
        with pytest.raises(SaveFailed, match="no longer in host memory"):
            save(checkpointer, state_of(1, LARGE), 1, None).result()
        process.backend.add(Fault("open_writer", nth=2, error=lambda: Unavailable("down")))
        assert_state(save(checkpointer, state_of(2, LARGE), 2, None).result().load(), 2, LARGE)


@pytest.mark.parametrize("options", [{"host_bytes_max": WINDOW - 1}, {"host_bytes_max": WINDOW, "in_flight_max": 2}])
def test_a_limit_too_low_is_refused_before_anything(place: Place, options: dict[str, Any]) -> None:
    process = place.open()
    with pytest.raises(InvalidInput, match=r"host_bytes_max=.*at least"):
        process.checkpointer(**options)
    with process.checkpointer() as checkpointer, pytest.raises(InvalidInput, match="sync="):
        checkpointer.save(state_of(1), step=1, sync=[""])


PEAK = """
import sys
from pathlib import Path
import numpy as np
import ckptfmt


def status(field):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(field))

state = {f"t{i}": np.random.default_rng(i).integers(0, 1 << 60, 3 << 20) for i in range(10)}  # 240 MiB
state["strided"] = state["t0"].reshape(1024, -1).T
small = {"t": np.ones(1 << 18)}
ckptfmt.save(small, sys.argv[1])  # code and pools that any save brings
for options, sync in (({"host_bytes_max": 64 << 20}, None), ({}, ["t*", "strided"]), ({}, ["t[5-9]"])):
    with ckptfmt.open(sys.argv[1]) as repository, repository.checkpointer(**options) as checkpointer:
        before = status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        checkpointer.save(state, step=1, sync=sync).result()
        print(status("VmHWM") - before)
with ckptfmt.open(sys.argv[1]) as repository, repository.checkpointer() as checkpointer:
    before = status("VmRSS")
    checkpointer.restore(state)
    restored = status("VmRSS") - before
    checkpointer.save(state, step=2, sync="*").result()
    print(restored, status("VmRSS") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs /proc/self/clear_refs")
def test_memory_stays_within_the_limit(root: Path) -> None:
    status, out, err = run_child(PEAK, root)
    assert status == 0, err
    staged, all_sync, half, restored, after = map(int, out.split())
    mib = 1 << 20
    assert staged <= (64 + 64) * mib
    assert all_sync <= 64 * mib + 16 * mib
    assert half <= (5 * 24 + 24 + 64) * mib + 16 * mib
    # A restore verifies all bytes in the memory of snapshots; a save that needs less of it gives the rest back.
    assert restored >= 200 * mib
    assert after <= 64 * mib + 16 * mib
