"""What the demo of many ranks found, as a frozen value and as a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ckptfmt.demo.ranks.aim import RankKill
from ckptfmt.demo.ranks.judge import TOLERANCE, Findings
from ckptfmt.demo.report import CommitFigures


@dataclass(frozen=True)
class RanksReport:
    """A finished demo: everything in it was found equal to the uninterrupted run, losses within ``TOLERANCE``."""

    url: str
    catalog: str
    """For display: without a password."""
    steps: int
    seconds: float
    ranks: int
    restarted_with: int
    kill: RankKill
    torn_down_seconds: float
    """From the kill to the end of the last process of the job."""
    abort_reason: str
    """What the catalog says of the generation that was hit."""
    findings: Findings
    saves: CommitFigures

    @property
    def steps_lost(self) -> int:
        return self.kill.trained - self.findings.resumed_step

    def as_json(self) -> dict[str, Any]:
        """As spec/cli-json.md has it."""
        found = dataclasses.asdict(self)
        return {"report": "demo_ranks", **found, "steps_lost": self.steps_lost, "tolerance": TOLERANCE}

    def rows(self) -> list[tuple[str, str]]:
        """What was found, line by line."""
        kill, found, saves = self.kill, self.findings, self.saves
        fewer = counted(self.restarted_with)
        compared = ", ".join(f"{count} {part}" for part, count in found.values.items())
        read = f"read {found.amplification:.2f} times the bytes"
        return [
            (
                "killed",
                f"rank {kill.rank} of {kill.ranks}, while generation #{kill.generation} (step {kill.step}) was "
                f"writing: it left {', '.join(kill.left)} and no part",
            ),
            (
                "torn down",
                f"{self.torn_down_seconds:.1f} s later no rank was left; generation #{kill.generation} aborted",
            ),
            ("aborted because", self.abort_reason),
            (
                "restored",
                f"generation #{found.resumed_generation} (step {found.resumed_step}) by {fewer} in "
                f"{found.restore_seconds:.2f} s; {read}",
            ),
            ("values restored", f"identical: {compared}, {found.own_values} of the ranks' own"),
            ("steps lost", f"{self.steps_lost}: trained to step {kill.trained}, resumed after {found.resumed_step}"),
            ("same batches", f"in every step; random numbers of {fewer} go on as if nothing had happened"),
            (
                "loss",
                f"{found.first_loss:.4f} -> {found.last_loss:.4f}; largest relative difference "
                f"{found.difference_before:.0e} on {self.ranks} ranks, {found.difference_after:.0e} on "
                f"{self.restarted_with} (allowed {TOLERANCE:.0e})",
            ),
            (
                "stall",
                f"{saves.stall_seconds * 1e3:.0f} ms (longest {saves.longest_stall_seconds * 1e3:.0f} ms) for "
                f"{saves.state_bytes / 1e6:.0f} MB in all, slowest rank",
            ),
            ("commit", f"after {saves.commit_seconds:.2f} s; median of {saves.commits} generations"),
        ]


def counted(ranks: int) -> str:
    return f"{ranks} rank{'s' if ranks > 1 else ''}"


def table(rows: Sequence[tuple[str, str]]) -> str:
    width = max(len(what) for what, _ in rows)
    return "\n".join(f"  {what:<{width}}  {found}" for what, found in rows)


def view_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Some columns of a view's rows, with their names above."""
    cells = [tuple(columns), *(tuple(_cell(row[column]) for column in columns) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  " + "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in cells
    )


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}"
    return f"{value:%H:%M:%S}" if isinstance(value, datetime) else str(value)
