"""Text that people and programs wrote, as every database can keep it.

PostgreSQL knows no NUL character and no half of a surrogate pair. Both come from file names and foreign messages, and
an error that could not be recorded would hide what it tells.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def storable(text: str) -> str:
    """The text, with what no database keeps written as an escape."""
    if text.isascii() and "\0" not in text:
        return text
    return text.encode("utf-8", "backslashreplace").decode("utf-8").replace("\0", "\\x00")


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
