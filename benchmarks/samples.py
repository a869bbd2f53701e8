"""All figures of a run, by group, measurement and contender, one entry a process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Sample = dict[str, Any]


class Samples:
    """``add`` what a process returned; ask for one figure over all processes."""

    def __init__(self, found: dict[str, dict[str, list[Sample]]] | None = None) -> None:
        self.found: dict[str, dict[str, list[Sample]]] = found or {}

    def add(self, group: str, contender: str, sample: Sample) -> None:
        self.found.setdefault(group, {}).setdefault(contender, []).append(sample)

    def of(self, group: str, contender: str, pick: Callable[[Sample], list[float]]) -> list[float]:
        """What ``pick`` takes from each process, one after the other."""
        return [value for sample in self.found[group][contender] for value in pick(sample)]

    def field(self, group: str, contender: str, name: str, *, skip: int = 0) -> list[float]:
        """A field that is one figure, or a list of them: the first ``skip`` of each process's list are left out."""
        found = [sample[name] for sample in self.found[group][contender]]
        return [value for one in found for value in (one[skip:] if isinstance(one, list) else [one])]

    def later(self, group: str, contender: str, field: str) -> list[float]:
        """A field of every save but the first of its process, whose buffers are cold."""
        return self.of(group, contender, lambda sample: [save[field] for save in sample["saves"][1:]])

    def first(self, group: str, contender: str, field: str) -> list[float]:
        return self.of(group, contender, lambda sample: [sample["saves"][0][field]])

    def ways(self, group: str, contender: str, field: str) -> dict[str, list[float]]:
        """Figures by way, where a field holds several ways."""
        return {name: self.way(group, contender, field, name) for name in self.found[group][contender][0][field]}

    def way(self, group: str, contender: str, field: str, name: str) -> list[float]:
        """The figures of one of several ways."""
        return self.of(group, contender, lambda sample: sample[field][name])

    def nbytes(self, group: str) -> int:
        return int(next(iter(self.found[group].values()))[0]["nbytes"])
