"""Sizes, durations, moments and counts as people read them."""

from __future__ import annotations

from datetime import datetime

from ckptfmt.engine.reports import human_bytes

ABSENT = "-"


def size(nbytes: float | None) -> str:
    """Bytes in decimal units: ``1.7 GB``."""
    return ABSENT if nbytes is None else human_bytes(nbytes)


def duration(seconds: float | None) -> str:
    """``840 us``, ``84 ms``, ``4.2 s``, ``3 min 20 s``, ``5 h 12 min``, ``3 d 4 h``."""
    if seconds is None:
        return ABSENT
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    whole = round(seconds)
    for unit, length, below, part in (("min", 60, "s", 1), ("h", 3600, "min", 60), ("d", 86400, "h", 3600)):
        limit = {"min": 3600, "h": 86400}.get(unit)
        if limit is None or whole < limit:
            rest = whole % length // part
            return f"{whole // length} {unit} {rest} {below}" if rest else f"{whole // length} {unit}"
    raise AssertionError("unreachable")


def age(then: datetime | None, now: datetime) -> str:
    """How long ago: one unit, ``4 min ago``; ``just now`` under a second."""
    if then is None:
        return ABSENT
    seconds = (now - then).total_seconds()
    if seconds < 0.95:
        return "just now" if seconds > -1 else f"in {_one_unit(-seconds)}"
    return f"{_one_unit(seconds)} ago"


def _one_unit(seconds: float) -> str:
    for unit, length, limit in (("s", 1, 60), ("min", 60, 60), ("h", 3600, 24)):
        if round(seconds / length) < limit:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"


def between(start: datetime | None, end: datetime | None) -> float | None:
    """Seconds from ``start`` to ``end``, None where either is unknown."""
    return None if start is None or end is None else (end - start).total_seconds()


def moment(when: datetime | None) -> str:
    """UTC to the second: ``2026-03-01 12:00:00Z``."""
    return ABSENT if when is None else f"{when:%Y-%m-%d %H:%M:%S}Z"


def clock(when: datetime) -> str:
    """UTC to the millisecond, for histories: ``2026-03-01 12:00:00.123Z``."""
    return f"{when:%Y-%m-%d %H:%M:%S}.{when.microsecond // 1000:03d}Z"


def rate(nbytes: float | None, seconds: float | None) -> str:
    return ABSENT if nbytes is None or not seconds or seconds <= 0 else f"{human_bytes(nbytes / seconds)}/s"


def count(number: int, noun: str, plural: str | None = None) -> str:
    """``1 run``, ``12,345 tensors``."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def shape(extent: tuple[int, ...]) -> str:
    """``[512, 256]``; a scalar is ``[]``."""
    return f"[{', '.join(map(str, extent))}]"
