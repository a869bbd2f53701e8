"""torch's small value types in the state tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ckptfmt.format.tree import register_tag


def register() -> None:
    """Teach the state tree ``torch.Size``, ``dtype``, ``device``, ``memory_format`` and ``layout``."""
    register_tag(torch.Size, "torch.Size", list, torch.Size)
    register_tag(torch.device, "torch.device", str, _device)
    for kind in (torch.dtype, torch.memory_format, torch.layout):
        register_tag(kind, f"torch.{kind.__name__}", _word, _reader(kind))


def _device(word: str) -> torch.device:
    try:
        return torch.device(word)
    except RuntimeError as error:
        raise ValueError(f"torch {torch.__version__} has no device called {word!r}") from error


def _word(value: Any) -> str:
    return str(value).removeprefix("torch.")


def _reader(kind: type) -> Callable[[str], Any]:
    def read(word: str) -> Any:
        found = getattr(torch, word, None)
        if not isinstance(found, kind):
            raise ValueError(f"torch {torch.__version__} has no {kind.__name__} called {word!r}")
        return found

    return read
