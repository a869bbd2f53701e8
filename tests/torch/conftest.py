"""A tiny stand-in for the engine: states become JSON and a dict of bytes, and come back."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import ckptfmt
from ckptfmt.format import tree
from ckptfmt.ports.arrays import Expansion, LeafSpec
from ckptfmt.torch.family import TorchFamily

if TYPE_CHECKING:
    from ckptfmt.torch.dcp import GenerationWriter


class Archive:
    """Stores what a state holds the way a generation does, in memory."""

    def __init__(self, family: TorchFamily) -> None:
        self.family = family
        self.tensors: dict[str, tuple[LeafSpec, bytes]] = {}
        self.arrays: dict[str, tuple[np.dtype[Any], tuple[int, ...], bytes]] = {}

    def encode(self, state: Any, path: str = "") -> str:
        return json.dumps(tree.encode(state, self._store, path=path))

    def decode(self, text: str) -> Any:
        return tree.decode(json.loads(text), self._build)

    def round_trip(self, state: Any) -> Any:
        return self.decode(self.encode(state))

    def _store(self, path: str, value: Any) -> tree.Node | None:
        if isinstance(value, np.ndarray):
            self.arrays[path] = (value.dtype, value.shape, value.tobytes())
            return tree.reference("array", path)
        if not self.family.owns(value):
            return None
        spec = self.family.describe(value, path)
        host = memoryview(bytearray(spec.nbytes))
        self.family.capture([(value, host)]).wait()
        self.tensors[path] = (spec, host.tobytes())
        return tree.reference("tensor", path, spec.flags)

    def _build(self, tag: str, payload: Any) -> Any:
        name, flags = tree.split_reference(payload)
        if tag == "array":
            dtype, shape, data = self.arrays[name]
            return np.frombuffer(bytearray(data), dtype).reshape(shape)
        spec, data = self.tensors[name]
        return self.family.build(spec, memoryview(bytearray(data)), flags, None)

    def expansions(self, state: Mapping[str, Any]) -> dict[str, Expansion]:
        objects = [(key, value) for key, value in state.items() if self.family.owns_object(value)]
        leaves = [(key, value) for key, value in state.items() if self.family.owns(value)]
        expanded = self.family.expand(objects, leaves)
        return {key: one for (key, _), one in zip(objects, expanded, strict=True)}

    def save(self, state: Mapping[str, Any]) -> dict[str, str]:
        """Save the modules, optimizers and stateful objects of ``state``."""
        saved = {key: self.encode(one.state, key) for key, one in self.expansions(state).items()}
        for key, value in state.items():
            if key not in saved and hasattr(value, "state_dict"):
                saved[key] = self.encode(value.state_dict(), key)
        return saved

    def restore(self, state: Mapping[str, Any], saved: Mapping[str, str]) -> None:
        """Fill modules in place, hand everything else its rebuilt state."""
        expanded = self.expansions(state)
        for key, text in saved.items():
            rebuilt = self.decode(text)
            one = expanded.get(key)
            if one is None:
                state[key].load_state_dict(rebuilt)
                continue
            if one.live:
                assert list(rebuilt) == list(one.state)
                for name, value in one.state.items():
                    if self.family.owns(value):
                        assert self.family.check_fillable(value, name) is None
                        self.family.fill([(value, memoryview(bytearray(self.tensors[f"{key}.{name}"][1])))]).wait()
            if one.check is not None:
                one.check(rebuilt)
            if one.apply is not None:
                one.apply(rebuilt)


@pytest.fixture
def family() -> TorchFamily:
    return TorchFamily()


@pytest.fixture
def archive(family: TorchFamily) -> Archive:
    return Archive(family)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """The tensor's bytes in C order, by a road that shares no code with the family."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    count = plain.numel()
    if not count:
        return b""
    storage = bytes(plain.untyped_storage())
    size, item = plain.shape, plain.element_size()
    pieces = []
    for index in np.ndindex(*size):
        at = plain.storage_offset() + sum(i * s for i, s in zip(index, plain.stride(), strict=True))
        pieces.append(storage[at * item : (at + 1) * item])
    return b"".join(pieces)


@pytest.fixture
def bytes_of() -> Any:
    return raw_bytes


@pytest.fixture
def root(tmp_path: Path, empty_repository: Path, quick: None) -> Path:
    """``tmp_path/r``: a copy of the empty repository that knows its new place."""
    shutil.copytree(empty_repository, tmp_path / "r")
    ckptfmt.open(tmp_path / "r").close()
    return tmp_path / "r"


@pytest.fixture
def writer(root: Path) -> Iterator[GenerationWriter]:
    from ckptfmt.torch.dcp import GenerationWriter

    with GenerationWriter(root) as writer:
        yield writer
