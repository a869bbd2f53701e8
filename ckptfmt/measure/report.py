"""What ``ckptfmt bench`` found. All times in seconds, in the order in which they were measured."""

from __future__ import annotations

from dataclasses import dataclass

from ckptfmt.engine.reports import Report


@dataclass(frozen=True)
class BenchTimings(Report):
    """One contender, or the raw limits: there a stall is a copy within memory, a commit a copy and a raw write."""

    name: str
    stalls: tuple[float, ...]
    commits: tuple[float, ...]
    restores_cold: tuple[float, ...]
    restores_warm: tuple[float, ...]


@dataclass(frozen=True)
class BenchReport(Report):
    """Saves and restores of one state by ckptfmt and by torch.save, in turns."""

    report: str
    url: str
    folder: str
    file_system: str
    nbytes: int
    tensors: int
    cpus: int
    direct: bool
    """Whether raw writes went past the page cache."""
    limits: BenchTimings
    contenders: tuple[BenchTimings, ...]
    left_over: tuple[str, ...]
    """Folders of benches that were killed."""
