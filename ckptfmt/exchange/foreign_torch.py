"""Files of ``torch.save``, as ``weights_only`` reads them: nested, with their ties and plain values."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ckptfmt import connect
from ckptfmt.engine.load import names
from ckptfmt.engine.save.freeze import FrozenLeaf, FrozenTree, freeze_tree
from ckptfmt.errors import InvalidInput, UnsupportedValue
from ckptfmt.exchange.foreign import Foreign, Kind
from ckptfmt.exchange.local_file import LocalFile
from ckptfmt.exchange.pieces import SourceBox, SourceTensor
from ckptfmt.format import tree


def require_torch(what: str) -> None:
    if importlib.util.find_spec("torch") is None:
        raise InvalidInput(f"{what} is read by torch, which is not installed: pip install 'ckptfmt[torch]'")


class _LeafBytes:
    """A live tensor's bytes."""

    __slots__ = ("_leaf",)

    def __init__(self, leaf: FrozenLeaf) -> None:
        self._leaf = leaf

    def read_into(self, first: int, memory: memoryview) -> None:
        family, value = self._leaf.family, self._leaf.value
        family.capture([(family.piece(value, first, first + memory.nbytes), memory)]).wait()


class TorchFile(Foreign):
    """Its state, whose tensors are mapped from the file."""

    def __init__(self, path: Path, file: LocalFile, saved: Any, folder: Path | None) -> None:
        self._saved = saved
        try:
            self._frozen: FrozenTree = freeze_tree(saved, connect.live_families())
        except UnsupportedValue as error:
            raise UnsupportedValue(f"{path}: {error}") from error
        tensors = {leaf.name: _tensor(leaf, file) for leaf in self._frozen.leaves}
        for alias, stored in self._frozen.aliases.items():
            tensors[alias] = replace(tensors[stored], name=alias)
        kind: Kind = "torch" if folder is None else "torch_folder"
        super().__init__(kind, folder or path, tensors, [file], values=tuple(self._nodes))

    @cached_property
    def _nodes(self) -> dict[str, tree.Node]:
        """Plain values by their dotted paths."""
        return {
            path: node
            for path, node, leaf in names.walk(self._frozen.common)
            if leaf and not next(iter(tree.references(node)), None)
        }

    def state(self) -> Any:
        return self._saved

    def value_texts(self) -> dict[str, str]:
        return {path: tree_text(node) for path, node in self._nodes.items()}


def tree_text(node: tree.Node) -> str:
    """A node without tensors as Python writes its value."""
    return repr(tree.decode(node, lambda tag, payload: tree.Foreign(tag, payload), lenient=True))


def open_torch_file(path: Path, folder: Path | None = None) -> Foreign:
    """Open a file: by itself, or as all that there is in ``folder``.

    ``InvalidInput`` without torch and for what weights_only refuses, ``UnsupportedValue`` naming the path of what
    the format has no place for."""
    require_torch(f"{path}, a file of torch.save,")
    from ckptfmt.torch.weights_only import load_file

    file = LocalFile(path)
    try:
        return TorchFile(path, file, load_file(path), folder)
    except BaseException:
        file.close()
        raise


def _tensor(leaf: FrozenLeaf, file: LocalFile) -> SourceTensor:
    spec = leaf.spec
    box = SourceBox(spec.start, spec.size, _LeafBytes(leaf))
    return SourceTensor(leaf.name, spec.dtype, spec.global_shape, (box,), file.name)
