"""The stages of a save, as a listener sees them."""

from __future__ import annotations

from typing import Final, Literal, Protocol

from ckptfmt.ports.records import GenerationRecord

Stage = Literal["freezing", "frozen", "staged", "durable", "committed", "failed"]

ORDER: Final[tuple[Stage, ...]] = ("freezing", "frozen", "staged", "durable", "committed")
"""The stages that lead to a commit; a stage that does not apply (no stage tier) is passed at once."""


class Listener(Protocol):
    """Told by the save's threads. Calls after ``succeeded`` or ``failed`` are ignored."""

    def advance(self, stage: Stage) -> None: ...

    def blocked(self, seconds: float) -> None:
        """Training was blocked for so long, once more."""

    def began(self, generation_id: int) -> None:
        """C1 is done: the generation has its id."""

    def succeeded(self, row: GenerationRecord) -> None: ...

    def failed(self, error: BaseException) -> None: ...


class Earlier(Protocol):
    """A save of the same launch with a lower number, whose verdict may still be out."""

    def wait_done(self, timeout: float | None = None) -> None:
        """Block until its verdict is known: its own deadline sees to that."""
