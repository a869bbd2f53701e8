"""What an error was caused by."""

from __future__ import annotations


def chain_of(error: BaseException | None) -> list[BaseException]:
    """The error and its explicit causes."""
    found = []
    while error is not None:
        found.append(error)
        error = error.__cause__
    return found
