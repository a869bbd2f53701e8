"""Text that people and programs wrote, as every database can keep it.

PostgreSQL knows no NUL character, and neither database half of a surrogate pair. Both come from file names and foreign
messages, and an error that could not be recorded would hide what it tells. So sessions pass every text that they bind
through here: it is stored, and looked for, in the same form on both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

R = TypeVar("R", bound="DataclassInstance")


def storable(text: str) -> str:
    """The text, with what no database keeps written as an escape."""
    if text.isascii() and "\0" not in text:
        return text
    return text.encode("utf-8", "backslashreplace").decode("utf-8").replace("\0", "\\x00")


def kept(value: Any) -> Any:
    """A value as a database keeps it: texts ``storable``, all else as it is."""
    return storable(value) if isinstance(value, str) else value


def as_kept(record: R) -> R:
    """The record as its row will read: whatever is compared with rows has to be."""
    texts = {field.name: getattr(record, field.name) for field in fields(record)}
    changed = {name: storable(text) for name, text in texts.items() if isinstance(text, str) and storable(text) != text}
    return replace(record, **changed) if changed else record


def document(value: Any) -> str:
    """JSON text of a value, its texts ``storable``. ``ValueError`` for numbers that JSON does not have."""
    return json.dumps(_storable(value), allow_nan=False)


def _storable(value: Any) -> Any:
    if isinstance(value, str):
        return storable(value)
    if isinstance(value, Mapping):
        return {storable(str(name)): _storable(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_storable(each) for each in value]
    return value
