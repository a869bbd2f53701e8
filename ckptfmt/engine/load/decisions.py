"""What a restore will do, leaf by leaf. Made before anything is touched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ckptfmt.engine.stored import Stored
from ckptfmt.format import tree
from ckptfmt.ports.arrays import ArrayFamily

Setter = Callable[[Any], None]


class Fill(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A live tensor that takes the bytes of a stored one. A Struct, since there is one for each tensor."""

    path: str
    value: Any
    family: ArrayFamily
    row: Stored
    start: tuple[int, ...]
    size: tuple[int, ...]
    cast: bool
    address: int | None
    """Where its bytes lay in host memory, dense and as they are stored, when this was decided; else None."""


@dataclass(frozen=True)
class Assign:
    """A value that is built from ``node`` and put into its container."""

    path: str
    node: tree.Node
    put: Setter


@dataclass(frozen=True)
class Apply:
    """An object that is handed its rebuilt state."""

    path: str
    node: tree.Node
    kind: str
    apply: Setter
    check: Setter | None
    """Raises ``Mismatch`` if ``apply`` would refuse the state; touches nothing."""
    translate: Callable[[Any], Any] | None = None
    """Gives the tensor names in the rebuilt state the names of the live state."""
    made: Mapping[str, Any] = field(default_factory=dict)
    """New tensors for what ``node`` refers to by these names: filled by the plan's ``builds`` before ``apply``."""


@dataclass
class RestorePlan:
    """What a restore will do. Nothing has been changed while this is made."""

    fills: list[Fill] = field(default_factory=list)
    assigns: list[Assign] = field(default_factory=list)
    applies: list[Apply] = field(default_factory=list)
    builds: list[Fill] = field(default_factory=list)
    """What fills the tensors that were made for ``applies``: no live value yet."""
    finish: list[Callable[[], None]] = field(default_factory=list)
    """Rebuilds immutable containers, innermost first, after the assigns."""
    loaded: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    cast: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def settled(self) -> int:
        """How many live names have found something saved, or were left out on purpose."""
        return len(self.loaded) + len(self.skipped) + len(self.problems)
