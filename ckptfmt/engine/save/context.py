"""What all saves of one launch have in common, and what one save was asked to do."""

from __future__ import annotations

from dataclasses import dataclass

from ckptfmt.engine.site import Site
from ckptfmt.ports.coordination import Coordination
from ckptfmt.ports.records import LaunchRecord, RunRecord


@dataclass(frozen=True)
class LaunchContext:
    """One launch of one run."""

    site: Site
    run: RunRecord
    launch: LaunchRecord
    coordination: Coordination
    commit_timeout: float


@dataclass(frozen=True)
class SaveOrder:
    """One save. ``created_at`` is when the snapshot was frozen (RFC 3339)."""

    n: int
    step: int
    key: str
    tags: tuple[str, ...]
    created_at: str
