"""What a demo with an object store and a stage found, as frozen values."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ckptfmt import GenerationInfo
from ckptfmt.demo.killer import Kill
from ckptfmt.demo.report import DemoReport
from ckptfmt.ports.catalog import Catalog


@dataclass(frozen=True)
class SaveMoments:
    """When one committed save was staged, durable and committed: seconds from its beginning in the catalog (C1).

    Where a kill came in between, they hold the time until somebody finished it.
    """

    generation: int
    step: int
    staged_seconds: float | None
    """None: the catalog was never told that it is staged."""
    durable_seconds: float | None
    committed_seconds: float | None
    finished_by: str
    """``itself``; of one that was killed ``restart``, or ``recover``."""


@dataclass(frozen=True)
class Inference:
    """A process without a catalog and without an SQL library that loaded the model."""

    reference: str
    seconds: float
    nbytes: int
    values: int
    """How many were found equal to the uninterrupted training's at its end."""


@dataclass(frozen=True)
class S3Report(DemoReport):
    """A demo whose repository is on an object store, with a stage."""

    catalog: str
    stage: str
    moments: tuple[SaveMoments, ...]
    """Of every committed generation, the oldest first."""
    inference: Inference

    @property
    def kills_staged(self) -> int:
        """Kills between staged and durable."""
        return sum(life.kill is not None and life.kill.staged for life in self.lives)

    def as_json(self) -> dict[str, Any]:
        """As spec/cli-json.md has it."""
        return {**super().as_json(), "report": "demo_s3", "kills_staged": self.kills_staged}

    @classmethod
    def of(
        cls, report: DemoReport, *, catalog: str, stage: str, moments: Sequence[SaveMoments], inference: Inference
    ) -> S3Report:
        common = {field.name: getattr(report, field.name) for field in dataclasses.fields(DemoReport)}
        return cls(**common, catalog=catalog, stage=stage, moments=tuple(moments), inference=inference)


def moments_of(
    catalog: Catalog, committed: Sequence[GenerationInfo], kills: Sequence[Kill], recovered: Collection[int]
) -> list[SaveMoments]:
    """``recovered`` are the ids of those that ``recover`` finished."""
    unfinished = {kill.generation for kill in kills if kill.state != "committed"}
    found = []
    for one in sorted(committed, key=lambda info: info.commit_seq or 0):
        staged = [rank.staged_at for rank in catalog.ranks(one.id)]
        told = [at for at in staged if at is not None]
        by = "recover" if one.id in recovered else "restart" if one.id in unfinished else "itself"
        found.append(
            SaveMoments(
                one.id,
                one.step,
                _since(one, max(told) if told and len(told) == len(staged) else None),
                _since(one, one.durable_at),
                _since(one, one.committed_at),
                by,
            )
        )
    return found


def moments_table(moments: Sequence[SaveMoments]) -> str:
    lines = [f"  {'GENERATION':>10}  {'STEP':>4}  {'STAGED':>9}  {'DURABLE':>9}  {'COMMITTED':>9}  FINISHED BY"]
    for one in moments:
        times = "  ".join(
            f"{'-' if seconds is None else f'{seconds:.2f} s':>9}"
            for seconds in (one.staged_seconds, one.durable_seconds, one.committed_seconds)
        )
        lines.append(f"  {f'#{one.generation}':>10}  {one.step:>4}  {times}  {one.finished_by}")
    return "\n".join(lines)


def _since(info: GenerationInfo, moment: datetime | None) -> float | None:
    return None if moment is None or info.created_at is None else (moment - info.created_at).total_seconds()
