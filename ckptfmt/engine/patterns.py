"""Patterns on dotted tensor names: ``fnmatchcase``, where ``*`` crosses dots."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

from ckptfmt.errors import InvalidInput

Patterns = str | Sequence[str]


def as_patterns(given: Patterns | None, what: str) -> tuple[str, ...] | None:
    """Check what a caller gave as the argument ``what``. Raises ``InvalidInput`` unless it holds non-empty strings."""
    if given is None:
        return None
    patterns = (given,) if isinstance(given, str) else tuple(given)
    if not patterns or not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise InvalidInput(f"{what}={given!r}: give one or more patterns, such as 'model.*' ('*' crosses dots)")
    return patterns


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether ``name`` fits one of ``patterns``."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
