"""Which names are objects, and which only look like ones.

Every backend checks keys here, so that all of them refuse the same ones.
"""

from __future__ import annotations

import os
import secrets
from typing import Final

from ckptfmt.errors import FormatError, InvalidInput
from ckptfmt.format.layout import validate_key, validate_plain_name

_TEMPORARY_PREFIX: Final = ".ckptfmt-tmp-"
"""Starts with a dot, as no component of a key may."""
_CATALOG_PREFIX: Final = "catalog.sqlite"


def checked_key(key: str) -> str:
    """Return ``key`` if it may name an object, else raise ``InvalidInput``.

    Beyond ``format.layout.validate_key``, the embedded catalog's files are refused: another
    descriptor opened and closed on an SQLite file drops the locks of this process.
    """
    validate_key(key)
    if is_catalog_file(key):
        raise InvalidInput(
            f"key {key!r} is a file of the embedded catalog, which only SQLite may open; "
            "use `ckptfmt db backup` for a copy"
        )
    return key


def checked_prefix(prefix: str) -> str:
    """Return ``prefix`` if it may name a folder ('' is the root), else raise ``InvalidInput``."""
    return prefix if prefix == "" else checked_key(prefix)


def temporary_name() -> str:
    """Return a name that no other write uses, of this process or another."""
    return f"{_TEMPORARY_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"


def is_temporary(name: str) -> bool:
    return name.startswith(_TEMPORARY_PREFIX)


def is_catalog_file(key: str) -> bool:
    """Whether ``key`` is one of the embedded catalog's files (database, journals), which lie at the root."""
    return key.startswith(_CATALOG_PREFIX) and "/" not in key


def is_component(name: str) -> bool:
    """Whether ``name`` can be a component of a key. Others (``.nfs0001``, ``lost+found``) are not ours."""
    try:
        validate_plain_name(name)
    except FormatError:
        return False
    return True
