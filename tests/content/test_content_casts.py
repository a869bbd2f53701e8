"""Every element type into every other: what cannot be converted is told before anything is filled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptfmt
from ckptfmt import connect
from ckptfmt.errors import CkptError, Mismatch, UnsupportedValue
from ckptfmt.format.dtypes import DTYPES, dtype, numpy_dtype
from ckptfmt.torch.elements import torch_dtype

COUNT = 6
PAIRS = [(live, saved) for live in sorted(DTYPES) for saved in sorted(DTYPES) if live != saved]

pytestmark = pytest.mark.filterwarnings("ignore:Casting complex", "ignore:ComplexHalf")


def live_of(library: str, name: str) -> Any:
    """Elements of that type, in two dimensions; None where the library lacks it."""
    memory = np.zeros(COUNT * dtype(name).itemsize, np.uint8)
    if library == "array":
        found = numpy_dtype(name)
        return None if found is None else memory.view(found).reshape(2, -1)
    try:
        return torch.from_numpy(memory).view(torch_dtype(name)).view(2, -1)
    except UnsupportedValue:
        return None


@pytest.mark.parametrize("library", ["array", "tensor"])
def test_what_the_check_lets_pass_is_converted(library: str) -> None:
    family = connect.live_families().named(library)
    assert family is not None
    outcomes = []
    for live, saved in PAIRS:
        value = live_of(library, live)
        if value is None:
            continue
        reason = family.check_cast(value, saved)
        host = memoryview(bytearray(COUNT * dtype(saved).itemsize))
        if reason is None:
            family.fill_cast(value, saved, host)
        else:
            with pytest.raises(CkptError) as caught:
                family.fill_cast(value, saved, host)
            assert str(caught.value) == reason
            assert saved in reason
        outcomes.append(reason is None)
    assert set(outcomes) == {True, False}


@pytest.mark.parametrize("atomic", [True, False])
def test_a_restore_lists_what_cannot_be_converted_and_changes_nothing(tmp_path: Path, atomic: bool) -> None:
    packed = torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    generation = ckptfmt.save({"a": np.ones(3), "one": packed, "two": packed.clone(), "z": np.ones(3)}, tmp_path)
    live = {
        "a": np.zeros(3, np.float32),
        "one": torch.zeros(4),
        "two": np.zeros(4, np.float32),
        "z": np.zeros(3, np.float32),
    }
    with pytest.raises(Mismatch, match="nothing was changed") as caught:
        generation.restore(live, cast=True, atomic=atomic)
    assert [problem.partition(":")[0] for problem in caught.value.problems] == ["one", "two"]
    assert all("float4_e2m1fn_x2" in problem for problem in caught.value.problems)
    assert not any(np.asarray(value).any() for value in live.values())
