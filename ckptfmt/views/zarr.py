"""A generation in zarr-python, if that is installed."""

from __future__ import annotations

import importlib.util
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from ckptfmt.engine.opened import Opened
from ckptfmt.errors import InvalidInput
from ckptfmt.views.opening import Reading

if TYPE_CHECKING:
    import zarr

    from ckptfmt.views.zarr_store import GenerationStore


def open_store(opened: Opened, guard: AbstractContextManager[None], reading: Reading) -> GenerationStore:
    """The store over ``opened``, which keeps ``guard`` entered. ``InvalidInput`` without zarr-python 3.1."""
    require_zarr()
    reading.require_possible(opened)
    from ckptfmt.views.zarr_store import GenerationStore

    return GenerationStore(opened, reading, guard)


def open_group(opened: Opened, guard: AbstractContextManager[None], reading: Reading) -> zarr.Group:
    """The group of all tensors in ``open_store``."""
    store = open_store(opened, guard, reading)
    import zarr

    return zarr.open_group(store, mode="r", zarr_format=3, use_consolidated=False)


def require_zarr() -> None:
    """``InvalidInput`` without zarr-python 3.1."""
    hint = "install it with pip install 'ckptfmt[zarr]'"
    if importlib.util.find_spec("zarr") is None:
        raise InvalidInput(f"zarr is not installed; {hint}")
    if importlib.util.find_spec("zarr.dtype") is None:
        raise InvalidInput(f"the installed zarr is older than 3.1, which has element types of one's own; {hint}")
