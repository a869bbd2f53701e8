"""What was found, what follows from it, and what to do where it is not ideal."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from ckptfmt.engine.reports import Report

Status = Literal["good", "slow", "bad", "note"]
"""``slow``: it works, but a fix makes it faster or safer. ``bad``: saving would fail. ``note``: a plain fact."""


@dataclass(frozen=True)
class Finding(Report):
    """One thing that was tried or looked up."""

    name: str
    status: Status
    found: str
    consequence: str
    fix: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Diagnosis(Report):
    """All findings on one place."""

    report: str
    url: str
    folder: str
    """Where it was tried: the place itself, or the nearest folder above it that exists."""
    ok: bool
    findings: tuple[Finding, ...]
