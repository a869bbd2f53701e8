"""What a planner leaves for the planners of loads (``Metadata.planner_data``), beside the paths of names: kept in the
generation's metadata, since it has to be frozen with everything else before the commit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlanner

from ckptfmt.engine.opened import Opened
from ckptfmt.torch.dcp.state import dotted

KEY: Final = "dcp_planner_data"
"""In the generation's metadata."""


def of_its_own(told: Any) -> bool:
    """Whether it is more than the paths of flat names, which the state tree has anyway."""
    if not isinstance(told, dict):
        return told is not None
    return not all(isinstance(path, tuple) and dotted(path) == name for name, path in told.items())


def left_by(planner: SavePlanner) -> Any:
    """What a planner that made the global plan leaves, as far as it can be seen before the save: in its ``metadata``,
    where DCP's default planner has what it returned. None on other ranks, and for mere paths."""
    found = getattr(planner, "metadata", None)
    told = found.planner_data if isinstance(found, Metadata) else None
    return told if of_its_own(told) else None


def beside(metadata: Any, told: Any) -> dict[str, Any] | None:
    """The metadata of a save with what its planner left; None if it has no place there."""
    if metadata is None:
        return {KEY: told}
    return {**metadata, KEY: told} if isinstance(metadata, Mapping) and KEY not in metadata else None


def kept_in(opened: Opened) -> Any:
    """What the planner of the save left, or None."""
    metadata = opened.metadata()
    return metadata.get(KEY) if isinstance(metadata, Mapping) else None
