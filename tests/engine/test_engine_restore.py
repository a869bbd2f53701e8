"""How verified bytes reach live tensors: boxes cut out of larger tensors, and bytes shown by the page cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt import Sharded
from ckptfmt.engine import read
from ckptfmt.errors import Corrupt

WIDE = 3 << 20
"""Elements: enough bytes to be shown rather than read."""


def numbers(seed: int, count: int = WIDE) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 2**31, count, dtype=np.int32)


def test_boxes_that_are_cut_out_live_until_they_are_copied(tmp_path: Path) -> None:
    """Each is memory of its own: with that given back too early, the copies read what is no longer mapped."""
    saved = {f"t{i}": numbers(i, 1 << 16).reshape(64, -1) for i in range(8)}
    ckptfmt.save(saved, tmp_path)
    into = {
        name: Sharded(np.zeros((32, 1024), dtype=np.int32), global_shape=(64, 1024), offsets=(16, 0)) for name in saved
    }
    ckptfmt.restore(into, tmp_path)
    for name, whole in saved.items():
        np.testing.assert_array_equal(into[name].local, whole[16:48])


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each restore was shown its bytes."""
    found: list[bool] = []
    plain = read.show_regions

    def watched(*arguments: Any) -> Any:
        result = plain(*arguments)
        found.append(result is not None)
        return result

    monkeypatch.setattr("ckptfmt.engine.load.memory.show_regions", watched)
    return found


def warm(folder: Path) -> None:
    for pack in folder.rglob("*.safetensors"):
        pack.read_bytes()


def test_a_restore_of_cached_bytes_is_shown_them(tmp_path: Path, shown: list[bool]) -> None:
    state = {"a": numbers(1), "b": numbers(2), "c": numbers(3, 10)}
    ckptfmt.save(state, tmp_path)
    warm(tmp_path)
    into = {name: np.zeros_like(value) for name, value in state.items()}
    ckptfmt.restore(into, tmp_path)
    if not any(shown):
        pytest.skip("no cached range can be shown here")
    for name, value in state.items():
        np.testing.assert_array_equal(into[name], value)
    into["a"][:] = 0  # nothing of what was shown is aliased
    np.testing.assert_array_equal(ckptfmt.load(tmp_path)["a"], state["a"])


def test_shown_bytes_are_verified_before_anything_is_copied(tmp_path: Path, shown: list[bool]) -> None:
    ckptfmt.save({"a": numbers(1), "b": numbers(2)}, tmp_path)
    warm(tmp_path)
    (pack,) = tmp_path.rglob("*.safetensors")
    with pack.open("r+b") as file:
        file.seek(-3, 2)
        file.write(b"\xff")
    into = {"a": np.zeros(WIDE, dtype=np.int32), "b": np.zeros(WIDE, dtype=np.int32)}
    with pytest.raises(Corrupt, match=r"tensor 'b': the bytes at offset \d+ of .*safetensors"):
        ckptfmt.restore(into, tmp_path)
    assert not into["a"].any()
    assert not into["b"].any()


def test_a_touched_arena_is_read_into(tmp_path: Path, shown: list[bool]) -> None:
    state = {"a": numbers(1)}
    with ckptfmt.open(tmp_path) as repo, repo.checkpointer() as checkpointer:
        first = checkpointer.save(state, step=0)
        assert first is not None
        first.wait()
        warm(tmp_path)
        into = {"a": np.zeros_like(state["a"])}
        checkpointer.restore(into)
        np.testing.assert_array_equal(into["a"], state["a"])
    assert shown == []
