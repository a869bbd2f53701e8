"""What ``torch.save`` wrote, read by ``torch.load(weights_only=True)`` and no other way: no code of a file is run."""

from __future__ import annotations

import io
import re
import warnings
from pathlib import Path
from typing import Any, Final

import torch

from ckptfmt.errors import CkptError, FormatError, InvalidInput
from ckptfmt.torch.elements import EXACT_TYPES, NAMES

_ZIP: Final = b"PK\x03\x04"
_REFUSAL: Final = re.compile(
    r"(?:Unsupported global: |unsupported )GLOBAL ([\w.]+)"
    r"|Can only (?:create new object|build).*but got <class '([\w.]+)'>"
)
_REASON: Final = re.compile(r"WeightsUnpickler error:\s*(.+)")


def load_file(path: Path) -> Any:
    """The state in a file, its tensors on the CPU: mapped, or in memory where the file is of torch before 1.6.

    ``InvalidInput`` names what weights_only refuses, and what to do; ``FormatError`` for what is no such file.
    """
    with open(path, "rb") as file:
        mapped = file.read(4) == _ZIP
    return _load(path, str(path), mmap=mapped)


def load_bytes(data: bytes, what: str) -> Any:
    """The same of bytes in memory, which ``what`` names."""
    return _load(io.BytesIO(data), what, mmap=False)


def _load(source: Any, what: str, *, mmap: bool) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch thinks of old files is told to nobody who could change it
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # torch's reader ends in any of them when a file is damaged
        raise _told(error, what) from error


def _told(error: Exception, what: str) -> CkptError:
    text = str(error)
    refused = _REFUSAL.search(text)
    if refused is not None:
        name = refused[1] or refused[2]
        return InvalidInput(
            f"{what} holds a {name}, which torch.load(weights_only=True) refuses: to build one may run code of it. "
            f"If you trust the file: load it in Python inside torch.serialization.safe_globals([{name}]), then "
            "ckptfmt.save what is to be kept",
            kind="weights_only",
        )
    reason = _REASON.search(text)
    told = text.partition("\n")[0] if reason is None else reason[1]
    return FormatError(
        f"{what} is not what torch.save writes by default, or is damaged: {type(error).__name__}: {told[:300]}; get "
        "another copy, or load it with torch and ckptfmt.save what is to be kept"
    )


def box_in(data: bytes, what: str) -> tuple[str, tuple[int, ...], memoryview]:
    """The only tensor in ``data``, by its element type, its shape, and its bytes in C order, which are not copied where
    they lie so. ``FormatError`` for anything else."""
    value = load_bytes(data, what)
    name = NAMES.get(value.dtype) if type(value) in EXACT_TYPES else None
    if name is None or value.layout is not torch.strided:
        raise FormatError(f"{what} is a {type(value).__name__} that is no plain tensor")
    plain = value.detach().resolve_conj().resolve_neg().contiguous()
    return name, tuple(value.shape), memoryview(plain.reshape(-1).view(torch.uint8).numpy())
