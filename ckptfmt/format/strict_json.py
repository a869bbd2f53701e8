"""Reading JSON that somebody else may have written: nothing is guessed, nothing silently dropped."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn, TypeVar

import msgspec

from ckptfmt.errors import FormatError

Pairs = list[tuple[str, Any]]
T = TypeVar("T")


def unique(pairs: Pairs) -> dict[str, Any]:
    """Return the members of an object; ``ValueError`` if a name stands twice."""
    members = dict(pairs)
    if len(members) != len(pairs):
        seen: set[str] = set()
        name = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"member {name[:80]!r} stands twice in one object")
    return members


_MAY_OVERFLOW: Final = re.compile(rb"[0-9]{200}|[0-9][eE]\+?[0-9]{3}")
"""What a number beyond the range of a float (1.8e308) needs to have: with an exponent of two digits 210 digits."""


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"the number {digits[:40]} is beyond the range of a float")
    return value


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


def parse(text: bytes, what: str, *, on_object: Callable[[Pairs], Any] = unique) -> Any:
    """Return the value of a UTF-8 JSON text.

    ``FormatError`` naming ``what`` for anything that is not JSON, duplicate members, NaN and
    Infinity, lone surrogates, and nesting that is too deep for this process. ``on_object`` turns
    the members of each object into its value and may raise ``ValueError``.
    """
    try:
        to_float = _finite if _MAY_OVERFLOW.search(text) else None
        value = json.loads(
            text.decode("utf-8"), object_pairs_hook=on_object, parse_constant=_no_constant, parse_float=to_float
        )
        if b"\\u" in text:
            # Escapes are the only way in for lone surrogates, which no UTF-8 output could show again.
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise FormatError(f"{what} is nested too deeply") from None
    except ValueError as error:  # includes JSONDecodeError and the Unicode errors
        raise FormatError(f"{what} is not valid: {error}") from error
    return value


def members(text: bytes, what: str) -> dict[str, msgspec.Raw]:
    """Return the members of one JSON object with their raw texts, in order, without parsing the values.

    Duplicate names are refused here for this object only.
    """
    try:
        raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"{what} is not a JSON object: {error}") from error
    # Joining the members again gives the same compact text only if none was dropped.
    if join(raw) != text.strip():
        parse(text, what)
    return raw


def join(raw: Mapping[str, msgspec.Raw]) -> bytes:
    """Return the compact JSON object of these members."""
    names = msgspec.json.encode(list(raw))[2:-2].split(b'","') if raw else []
    if len(names) != len(raw):  # a name holds what separates names here
        names = [msgspec.json.encode(name)[1:-1] for name in raw]
    return b"{" + b",".join([b'"%b":%b' % pair for pair in zip(names, raw.values(), strict=True)]) + b"}"


def convert(value: Any, type_: type[T], what: str) -> T:
    """Return ``value`` (parsed JSON) as ``type_``; ``FormatError`` names ``what`` and the member that doesn't fit."""
    try:
        return msgspec.convert(value, type=type_)
    except msgspec.ValidationError as error:
        raise FormatError(f"{what} is not valid: {error}") from error


def decode(text: bytes | msgspec.Raw, type_: type[T], what: str) -> T:
    """Return a JSON text as ``type_``, fast. Duplicate members are the caller's to refuse (``members``)."""
    try:
        return msgspec.json.decode(text, type=type_)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"{what} is not valid: {error}") from error
