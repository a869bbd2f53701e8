"""What was explored, in words, for the end of the test log."""

from __future__ import annotations

from typing import Final

from protocol_model.explorer import Found

TITLE: Final = "the model of the commit protocol"


def report(found: Found) -> list[str]:
    head = (
        f"{found.variant.name}: {found.states:,} states, {found.transitions:,} transitions, depth {found.depth}, "
        f"recover run from {found.recovers:,} situations, {found.seconds:.1f} s of CPU"
    )
    if found.broken is None:
        return [head]
    return [head, f"    finds: {found.broken}", *(f"    {line}" for line in found.trace)]
