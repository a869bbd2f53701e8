"""A state's text is read when somebody asks for the state: what is wrong with it shows before anything is touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

import ckptfmt
from ckptfmt.engine import opened
from ckptfmt.errors import FormatError
from ckptfmt.format.manifest import Manifest, decode_manifest


@pytest.fixture
def no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every manifest that is read, the number 41 of the state has more digits than any number."""

    def decode(stored: bytes) -> Manifest:
        text = zstandard.ZstdDecompressor().decompress(stored)
        head, mark, trees = text.partition(b'"trees":')
        assert b'["n",41]' in trees
        return decode_manifest(
            zstandard.compress(head + mark + trees.replace(b'["n",41]', b'["n",%s]' % (b"4" * 5000)))
        )

    monkeypatch.setattr(opened, "decode_manifest", decode)


def test_a_state_that_is_none_is_refused_before_a_restore_writes(tmp_path: Path, no_state: None) -> None:
    state: dict[str, Any] = {"w": np.arange(6), "n": 41}
    ckptfmt.save(state, tmp_path)
    into: dict[str, Any] = {"w": np.zeros(6, dtype=state["w"].dtype), "n": 0}
    with pytest.raises(FormatError, match=r"generation 1 of run .*the state is not valid"):
        ckptfmt.restore(into, tmp_path)
    assert not into["w"].any()
    assert into["n"] == 0
    with pytest.raises(FormatError, match="the state is not valid"):
        ckptfmt.load(tmp_path)


def test_its_tensors_can_still_be_read_by_name(tmp_path: Path, no_state: None) -> None:
    state = {"w": np.arange(6), "n": 41, "b": np.ones(3, np.float32), "e": np.zeros(0)}
    ckptfmt.save(state, f"{tmp_path}#run")
    with ckptfmt.open(tmp_path, mode="r") as repository:
        generation = repository.latest("run")
        for name in ("w", "w", "b", "e", "w", "b"):
            np.testing.assert_array_equal(generation[name].read(), state[name])
        with pytest.raises(FormatError, match=r"the state is not valid.*its tensors can still be read by name"):
            generation.load()


@pytest.mark.parametrize(
    "new", [rb'{"tensor":"\u0077"}', rb'{"t\u0065nsor":"w"}', b'{"tensor": "w"}', b'{"tensor":"w"}']
)
def test_who_asks_first_is_told_the_same_as_who_asks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new: bytes
) -> None:
    """Also where another writer spells the reference in another way."""

    def decode(stored: bytes) -> Manifest:
        text = zstandard.ZstdDecompressor().decompress(stored)
        assert b'{"array":"w"}' in text
        return decode_manifest(zstandard.compress(text.replace(b'{"array":"w"}', new)))

    monkeypatch.setattr(opened, "decode_manifest", decode)
    ckptfmt.save({"w": np.arange(6), "b": np.ones(3)}, f"{tmp_path}#run")
    with ckptfmt.open(tmp_path, mode="r") as repository:
        found = repository.latest("run")._opened
        assert [found.saved_as("w") for _ in range(3)] == ["tensor"] * 3
        assert found.saved_as("b") == "array"
