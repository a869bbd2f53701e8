"""How the ranks of one launch agree on a save, without collectives on the save path.

With world size 1 the catalog's own rows are enough (``engine.save.alone``). Other coordinations
(rows of a shared catalog, torch.distributed's store) join here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class PartReport:
    """One rank's acknowledgement: its part is durable on the durable tier."""

    rank: int
    part_name: str
    part_digest: str
    nbytes: int
    stall_seconds: float
    write_seconds: float
    retries: int


class Coordination(Protocol):
    """The meeting place of one launch's ranks."""

    rank: int
    world_size: int

    def is_coordinator(self) -> bool:
        """Whether this rank merges and commits unless it dies."""

    def report(self, generation_id: int, part: PartReport) -> None:
        """C2: acknowledge. Raises ``Conflict`` if the generation is no longer ``writing``."""

    def report_failure(self, generation_id: int, *, stage: str, reason: str) -> None:
        """Tell the others that this rank failed."""

    def gather(self, generation_id: int, *, timeout: float) -> list[PartReport]:
        """C3: block until every expected rank has acknowledged.

        ``SaveFailed`` names the rank that failed or stayed silent.
        """
