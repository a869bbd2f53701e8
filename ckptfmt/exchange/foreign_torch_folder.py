"""Folders of files of ``torch.save`` as Hugging Face's tools wrote them: ``pytorch_model.bin`` alone, or numbered files
with an index. Of numbered files one at a time is mapped, or in memory if it is of torch before 1.6."""

from __future__ import annotations

import os
import threading
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckptfmt import connect
from ckptfmt.errors import Conflict, FormatError, InvalidInput, NotFound, UnsupportedValue
from ckptfmt.exchange.foreign import Foreign, is_torch_index, is_torch_weights
from ckptfmt.exchange.foreign_torch import open_torch_file, require_torch
from ckptfmt.exchange.local_file import LocalFile
from ckptfmt.exchange.pieces import SourceBox, SourceTensor
from ckptfmt.exchange.weight_map import WeightMap, read_weight_map
from ckptfmt.ports.arrays import ArrayFamily, LeafSpec


@dataclass(frozen=True)
class _Live:
    """A tensor of the file that is open."""

    value: Any
    family: ArrayFamily
    spec: LeafSpec


class _Shards:
    """Opens one file at a time. Readers ask in the order of the files, but for small tensors, which packs have last."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._open: str | None = None
        self._tensors: Mapping[str, _Live] = {}

    def tensors(self, file: str) -> Mapping[str, _Live]:
        with self._lock:
            if self._open != file:
                self._forget()  # first: two of them may be more than memory holds
                self._tensors = _tensors_in(self._path / file)
                self._open = file
            return self._tensors

    def close(self) -> None:
        with self._lock:
            self._forget()

    def _forget(self) -> None:
        self._open, self._tensors = None, {}


def _tensors_in(path: Path) -> dict[str, _Live]:
    """``FormatError`` or ``UnsupportedValue`` names the file and the key."""
    from ckptfmt.torch.weights_only import load_file

    saved = load_file(path)
    if not isinstance(saved, Mapping):
        raise FormatError(f"{path} holds a {type(saved).__name__}; a numbered file has a mapping of tensors by name")
    families = connect.live_families()
    found: dict[str, _Live] = {}
    for key, value in saved.items():
        family = families.of(value)
        if type(key) is not str or family is None or family.name != "tensor":
            raise FormatError(
                f"{path}: {key!r} is a {type(value).__name__}; a numbered file has a mapping of tensors by name"
            )
        try:
            found[key] = _Live(value, family, family.describe(value, key))
        except UnsupportedValue as error:
            raise UnsupportedValue(f"{path}: {error}") from error
    return found


class _ShardBytes:
    """The bytes of one tensor."""

    __slots__ = ("_file", "_name", "_shards", "_spec")

    def __init__(self, shards: _Shards, file: LocalFile, name: str, spec: LeafSpec) -> None:
        self._shards = shards
        self._file = file
        self._name = name
        self._spec = spec

    def read_into(self, first: int, memory: memoryview) -> None:
        live = self._shards.tensors(self._file.name).get(self._name)
        if live is None or (live.spec.dtype, live.spec.size) != (self._spec.dtype, self._spec.size):
            raise Conflict(
                f"{self._file.path}: {self._name!r} is no longer what it was when the folder was opened; read it when "
                "nobody writes there",
                kind="source_changed",
            )
        live.family.capture([(live.family.piece(live.value, first, first + memory.nbytes), memory)]).wait()


class TorchShards(Foreign):
    """Tensors by name, those of one file after those of another. What is tied within a file stays tied."""

    def __init__(self, path: Path, index: WeightMap, files: list[LocalFile]) -> None:
        self._shards = _Shards(path)
        tensors: dict[str, SourceTensor] = {}
        for file in files:
            self._add(file, tensors)
        for name, place in index.listed.items():
            if name not in tensors or tensors[name].file != place:
                raise FormatError(
                    f"{path}: {index.file.name} places tensor {name!r} in {place}, which does not have it"
                )
        super().__init__("torch_folder", path, tensors, [index.file, *files])

    def _add(self, file: LocalFile, tensors: dict[str, SourceTensor]) -> None:
        tied: dict[Hashable, str] = {}
        for name, live in self._shards.tensors(file.name).items():
            if name in tensors:
                raise FormatError(f"{file.path}: tensor {name!r} stands in {tensors[name].file}, too")
            spec = live.spec
            first = None if spec.alias is None else tied.setdefault(spec.alias, name)
            if first is not None and first != name:
                tensors[name] = replace(tensors[first], name=name)
                continue
            box = SourceBox(spec.start, spec.size, _ShardBytes(self._shards, file, name, spec))
            tensors[name] = SourceTensor(name, spec.dtype, spec.global_shape, (box,), file.name)

    def close(self) -> None:
        self._shards.close()
        super().close()


def open_torch_folder(path: Path) -> Foreign:
    """``InvalidInput`` without torch, for what weights_only refuses, and where it is open which files are meant;
    ``NotFound`` and ``FormatError`` name the file and the tensor that do not go together."""
    require_torch(f"{path}, a folder of files of torch.save,")
    names = sorted(os.listdir(path))
    indices = [path / name for name in names if is_torch_index(name)]
    alone = [name for name in names if is_torch_weights(name)]
    if len(alone) > 1 or (alone and indices):
        both = ", ".join([*alone, *(index.name for index in indices)])
        raise InvalidInput(
            f"{path} has several checkpoints ({both}): give one file, or put one into a folder of its own"
        )
    if alone:
        return open_torch_file(path / alone[0], folder=path)
    if not indices:
        raise NotFound(
            f"{path} has numbered files of a checkpoint, but no index (pytorch_model.bin.index.json) that tells which "
            "belong together: get it, too"
        )
    index = read_weight_map(indices)
    files: list[LocalFile] = []
    try:
        if not index.listed:
            raise FormatError(f"{index.file.path} places no tensor in any file")
        for name in index.names:
            files.append(index.open(name))
        return TorchShards(path, index, files)
    except BaseException:
        for file in (index.file, *files):
            file.close()
        raise
