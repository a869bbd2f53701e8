"""The tiers of a repository beside its durable one (spec/tiers.md)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

from ckptfmt.ports.backend import Backend

Role = Literal["durable", "stage", "replica"]


@dataclass(frozen=True)
class Tier:
    """One place that holds objects of a repository, under the same keys as every other."""

    uuid: str
    role: Role
    backend: Backend
    host: str | None = None
    """Of a stage: the host that it is local to."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """``bytes_max`` and ``keep`` of a stage."""

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.role} {self.backend.url}"


@dataclass(frozen=True)
class Tiers:
    """The stage and the replicas that were opened with a repository. The durable tier is ``Site.backend``."""

    stage: Tier | None = None
    replicas: tuple[Tier, ...] = ()
    durable_on: int = 1
    """How many of durable tier and replicas must hold all packs before a generation counts as durable."""
    limiter: Any = None
    """What copies between tiers ask for leave; None: nothing is limited."""

    def __bool__(self) -> bool:
        return self.stage is not None or bool(self.replicas)

    def close(self) -> None:
        with ExitStack() as ends:  # each of them, also where another one fails
            for tier in self.every():
                ends.callback(tier.backend.close)

    def every(self) -> tuple[Tier, ...]:
        return self.replicas if self.stage is None else (self.stage, *self.replicas)
