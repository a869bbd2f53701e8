"""A restore under ``host_bytes_max``: all or nothing where its bytes fit into the limit, else through a window."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from lifecycle_rig import Place

from ckptfmt.engine import plan as plans
from ckptfmt.engine import units
from ckptfmt.errors import BackendError
from ckptfmt.testing.faults import Fault

NUMBERS = 100_000


def state_of(value: float) -> dict[str, Any]:
    return {name: np.full(NUMBERS, value) for name in ("a", "b", "c")}


@pytest.mark.parametrize(("limit", "changed"), [(None, 0), (3 * 8 * NUMBERS, 0), (3 * 8 * NUMBERS - 1, 2)])
@pytest.mark.parametrize("in_flight_max", [1, 2])
def test_the_limit_decides_whether_a_restore_is_all_or_nothing(
    place: Place, monkeypatch: pytest.MonkeyPatch, limit: int | None, changed: int, in_flight_max: int
) -> None:
    monkeypatch.setattr(plans, "HOST_BYTES_MIN", 1 << 16)
    monkeypatch.setattr(plans, "WINDOW_BYTES", 1 << 16)
    monkeypatch.setattr(units, "IO_BYTES", 1 << 13)
    with place.open().checkpointer() as checkpointer:
        checkpointer.save(state_of(7.0), step=1)
    process = place.open()
    with process.checkpointer(host_bytes_max=limit, in_flight_max=in_flight_max) as checkpointer:
        into = state_of(0.0)
        last = process.backend.add(Fault("read_into", error=lambda: BackendError("the disk is broken"), when=covers_c))
        with pytest.raises(BackendError, match="the disk is broken") as caught:
            checkpointer.restore(into)
        assert last.fired == 1
        assert sum(float(value[0]) == 7.0 for value in into.values()) == changed
        notes = getattr(caught.value, "__notes__", [])
        assert notes == (["already changed: a, b"] if changed else [])
        report = checkpointer.restore(into)
        assert report is not None
        assert all((value == 7.0).all() for value in into.values())
        assert checkpointer._flights.idle_arena().nbytes <= (limit or 1 << 40) // in_flight_max + (2 << 20)


def covers_c(call: Any) -> bool:
    """Whether the call reads the last bytes of the pack, which are those of ``c``."""
    return call.offset is not None and call.offset + call.nbytes > 2.5 * 8 * NUMBERS


def with_optimizer(value: float) -> dict[str, Any]:
    """Two tensors of 1 MiB, and an optimizer that holds twice as much."""
    tensors = {name: torch.full((1 << 18,), value, requires_grad=True) for name in ("a", "b")}
    optimizer = torch.optim.Adam(tensors.values())
    for tensor in tensors.values():
        tensor.grad = torch.full_like(tensor, value)
        optimizer.state[tensor] = {name: torch.full_like(tensor, value) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[tensor]["step"] = torch.tensor(value)
    return {**tensors, "optimizer": optimizer}


@pytest.mark.parametrize(("limit", "changed"), [(6 << 20, 1), ((6 << 20) + 8, 0)])
def test_what_load_state_dict_takes_counts(
    place: Place, monkeypatch: pytest.MonkeyPatch, limit: int, changed: int
) -> None:
    """Tensors of 6 MiB, and two of 4 bytes: only the live ones can go through the window."""
    monkeypatch.setattr(plans, "HOST_BYTES_MIN", 1 << 16)
    with place.open().checkpointer() as checkpointer:
        checkpointer.save(with_optimizer(7.0), step=1)
    process = place.open()
    with process.checkpointer(host_bytes_max=limit) as checkpointer:
        into = with_optimizer(0.0)
        process.backend.add(Fault("read_into", error=lambda: BackendError("the disk is broken"), when=covers_b))
        with pytest.raises(BackendError, match="the disk is broken") as caught:
            checkpointer.restore(into)
        assert [bool((into[name] == 7.0).all()) for name in ("a", "b")] == [bool(changed), False]
        assert getattr(caught.value, "__notes__", []) == (["already changed: a"] if changed else [])
        assert not into["optimizer"].state[into["a"]]["exp_avg"].any()
        assert checkpointer.restore(into) is not None
        assert (into["b"] == 7.0).all()
        assert (into["optimizer"].state[into["b"]]["exp_avg_sq"] == 7.0).all()


def covers_b(call: Any) -> bool:
    return call.offset is not None and call.offset <= (1 << 20) + (1 << 19) < call.offset + call.nbytes
