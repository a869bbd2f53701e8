"""Checkpoints that other tools wrote, through one small interface: what ``import``, ``inspect``, ``diff`` and
``verify`` know of them. Nothing here writes, and no code of a file is run."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import unquote, urlsplit

from ckptfmt.backends.posix_errors import translated
from ckptfmt.errors import InvalidInput
from ckptfmt.exchange.local_file import LocalFile, require_regular
from ckptfmt.exchange.pieces import SourceTensor
from ckptfmt.format import layout

Kind = Literal["safetensors", "safetensors_folder", "torch", "torch_folder", "dcp", "zarr"]

KINDS: Final[Mapping[Kind, str]] = {
    "safetensors": "a safetensors file",
    "safetensors_folder": "a folder of safetensors files",
    "torch": "a file of torch.save",
    "torch_folder": "a folder of pytorch_model files",
    "dcp": "a torch.distributed.checkpoint directory",
    "zarr": "a Zarr v3 group",
}


@dataclass
class Foreign:
    """One opened checkpoint of another tool. Close it when done."""

    kind: Kind
    path: Path
    tensors: Mapping[str, SourceTensor]
    """By name. Where two names are of one tensor (ties), either has it, with the same ``boxes``, if the file tells."""
    files: Sequence[LocalFile]
    """What the bytes come from."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Texts that the file carries about itself."""
    values: Sequence[str] = ()
    """Dotted paths of what is no tensor."""

    def state(self) -> Any:
        """What to save: nested containers with a ``SourceTensor`` or a live tensor at each leaf, and plain values."""
        return dict(self.tensors)

    def value_texts(self) -> dict[str, str]:
        """What is no tensor, by its dotted path, as Python writes it."""
        return {}

    @property
    def nbytes(self) -> int:
        """Of the tensors; of tied ones once."""
        return sum({id(tensor.boxes): tensor.nbytes for tensor in self.tensors.values()}.values())

    @property
    def files_nbytes(self) -> int:
        """Of the files, with all that they hold beside tensors."""
        return sum(file.nbytes for file in self.files)

    def digests(self, read: Callable[[int], None] | None = None) -> Iterator[tuple[str, int, str]]:
        """Name, bytes and xxh3-128 of each file: reads them whole, telling ``read`` of each piece, in bytes."""
        for file in self.files:
            yield file.name, file.nbytes, file.digest(read)

    def changed(self) -> str | None:
        """The name of a file that is no longer what it was when it was opened, or None."""
        return next((file.name for file in self.files if file.changed()), None)

    def close(self) -> None:
        for file in self.files:
            file.close()

    def __enter__(self) -> Foreign:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def local_path(url: str) -> Path | None:
    """The path that ``url`` names on this machine, or None for another scheme."""
    scheme, colon, _ = url.partition("://")
    if not colon:
        return Path(url)
    return Path(unquote(urlsplit(url).path)) if scheme == "file" else None


def kind_of(path: Path) -> Kind | None:
    """What lies at ``path``, by its names and first bytes; None for what is none of ``KINDS``."""
    if path.is_dir():
        return _kind_of_folder(path)
    return _kind_of_file(path) if path.exists() else None


def open_foreign(path: Path) -> Foreign:
    """Open what lies at ``path``; tensors are read when they are asked for.

    ``InvalidInput`` for what is none of ``KINDS`` or needs a library that is not installed, ``NotFound``,
    ``FormatError`` and ``Corrupt`` that name the file.
    """
    path = path.absolute()
    with translated("open", str(path)):
        os.stat(path)
        kind = kind_of(path)
    if kind is None:
        raise InvalidInput(f"{path} is none of what can be read here: {', '.join(KINDS.values())}{_hint(path)}")
    if kind in ("safetensors", "safetensors_folder"):
        from ckptfmt.exchange import foreign_safetensors as s

        return s.open_file(path) if kind == "safetensors" else s.open_folder(path)
    if kind == "torch":
        from ckptfmt.exchange.foreign_torch import open_torch_file

        return open_torch_file(path)
    if kind == "torch_folder":
        from ckptfmt.exchange.foreign_torch_folder import open_torch_folder

        return open_torch_folder(path)
    if kind == "dcp":
        from ckptfmt.exchange.foreign_dcp import open_dcp

        return open_dcp(path)
    from ckptfmt.exchange.foreign_zarr import open_zarr

    return open_zarr(path)


_ZIP: Final = b"PK\x03\x04"
_LEGACY_TORCH: Final = b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"
"""The magic number of torch.save before version 1.6, as pickle writes it."""
_TORCH_INDEX: Final = re.compile(r".+\.bin\.index(\.[\w-]+)?\.json")
"""Words between dots are variants: ``pytorch_model.fp16.bin``."""
_TORCH_WEIGHTS: Final = re.compile(r"((diffusion_)?pytorch_model|adapter_model)(\.[\w-]+)?\.bin")
_TORCH_NUMBERED: Final = re.compile(r"(diffusion_)?pytorch_model(\.[\w-]+)?-\d{5}-of-\d{5}(\.[\w-]+)?\.bin")
_TORCH_SUFFIXES: Final = frozenset({".pt", ".pth", ".bin", ".ckpt", ".tar"})


def _kind_of_file(path: Path) -> Kind | None:
    require_regular(path)
    with translated("open", str(path)), open(path, "rb") as file:
        head = file.read(64)
    if path.suffix == ".safetensors":
        return "safetensors"
    if head.startswith(_ZIP) or _LEGACY_TORCH in head:
        return "torch"
    if len(head) > 8 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 32:
        return "safetensors"
    return "torch" if path.suffix in _TORCH_SUFFIXES else None


def _kind_of_folder(path: Path) -> Kind | None:
    names = set(os.listdir(path))
    if names & {layout.MARKER, layout.COMMIT}:
        return None  # ours
    if ".metadata" in names:
        return "dcp"
    if "zarr.json" in names:
        return "zarr"
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        return "safetensors_folder"
    if any(is_torch_index(name) or is_torch_weights(name) or _TORCH_NUMBERED.fullmatch(name) for name in names):
        return "torch_folder"
    return None


def is_torch_index(name: str) -> bool:
    """Whether a file in a folder of torch files is called as an index of numbered ones is."""
    return _TORCH_INDEX.fullmatch(name) is not None


def is_torch_weights(name: str) -> bool:
    """Whether a file of torch.save is called as one that has all weights is. A folder has other ``.bin`` files, too:
    arguments of a training, states of optimizers."""
    return _TORCH_WEIGHTS.fullmatch(name) is not None


def _hint(path: Path) -> str:
    if not path.is_dir():
        return ""
    names = set(os.listdir(path))
    if layout.MARKER in names:
        return "; it is a ckptfmt repository, which needs no import"
    if layout.COMMIT in names:
        return "; it is the folder of a ckptfmt generation: load it with ckptfmt.load"
    if any(name.endswith(".distcp") for name in names):
        return "; it has .distcp files but no .metadata, so its save was never completed"
    return ""
