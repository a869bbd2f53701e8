"""What a rebuild hands to the catalog: what storage proves of each generation, to be put into rows.

Beside ``ports/catalog.py``, for ``Catalog.restore``. See spec/catalog.md, "When the catalog is lost".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from ckptfmt.ports.records import AdoptFacts, CatalogIdentity

Action = Literal["restored", "adopted", "aborted", "retired", "known", "left_out"]


@dataclass(frozen=True)
class ProvenGeneration:
    """One generation, as its valid verdict on storage tells of it. Times are aware UTC."""

    key: str
    id: int
    step: int
    epoch: int
    """Of the verdict."""
    fence: int
    """Of the verdict."""
    world_size: int
    adoption: AdoptFacts | None = None
    """Set for a committed verdict, unless the catalog is known to have the commit."""
    launch: str | None = None
    """``layout.launch_digest`` of the launch's token; None where storage no longer tells."""
    save_number: int | None = None
    created_at: datetime | None = None
    retired_at: datetime | None = None
    """Its tombstone's time."""
    swept: bool = False
    """Nothing but verdict and tombstone is left of it."""
    aborted: str | None = None
    """The reason of an aborted verdict."""
    quarantine: str | None = None
    """Why it cannot be read, though its verdict says committed."""


@dataclass(frozen=True)
class ProvenRun:
    """One run, as storage tells of it. Counters are the largest values seen, not the next ones."""

    name: str
    key: str
    commit_seq_max: int
    fence_max: int
    generations: Sequence[ProvenGeneration] = field(default_factory=tuple)


@dataclass(frozen=True)
class Restoration:
    """One rebuild, to be done in one transaction."""

    expected: CatalogIdentity
    """What the catalog was when the rebuild began: if it is another now, somebody else has rebuilt it."""
    new: CatalogIdentity
    how: str
    url: str
    """Where the root is."""
    runs: Sequence[ProvenRun]
    id_max: int
    """The largest id that may have been handed out."""


@dataclass(frozen=True)
class RestoredRow:
    """What ``Catalog.restore`` did with one generation."""

    run: str
    key: str
    id: int
    step: int
    state: str
    """Its state now; of one that was left out the state that storage proves."""
    action: Action
    reason: str = ""
