"""The one place where database exceptions become ``CatalogError``."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from sqlalchemy.exc import DBAPIError, IntegrityError, SQLAlchemyError

from ckptfmt.errors import CatalogError

_BUSY_CODES: Final = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
_ADVICE: Final = {
    sqlite3.SQLITE_FULL: "the disk is full: free space and repeat",
    sqlite3.SQLITE_READONLY: "the file or its folder is read-only: check its permissions and the mount",
    sqlite3.SQLITE_PERM: "permission was denied: check the file's owner and mode",
    sqlite3.SQLITE_CANTOPEN: "the file cannot be opened: check that it and its folder exist and may be written",
    sqlite3.SQLITE_IOERR: "the disk failed: check the system log, then run `ckptfmt db check`",
    sqlite3.SQLITE_CORRUPT: "the file is damaged: restore the last `ckptfmt db backup`",
    sqlite3.SQLITE_NOTADB: "the file is not a SQLite database: check the URL",
}


def sqlite_code(error: BaseException) -> int | None:
    """Return the primary SQLite result code of a driver or SQLAlchemy error, if it carries one."""
    original = error.orig if isinstance(error, DBAPIError) else error
    code = getattr(original, "sqlite_errorcode", None)
    return code & 0xFF if isinstance(code, int) else None


def is_busy(error: BaseException) -> bool:
    """Whether another connection holds the lock: the same call may succeed later."""
    return sqlite_code(error) in _BUSY_CODES


@contextmanager
def translated(url: str) -> Iterator[None]:
    """Raise ``CatalogError`` in place of any SQLAlchemy or driver exception; the cause is chained."""
    try:
        yield
    except (SQLAlchemyError, sqlite3.Error) as error:
        raise _translate(error, url) from error


def _translate(error: Exception, url: str) -> CatalogError:
    original = error.orig if isinstance(error, DBAPIError) else error
    text = str(original).strip() or type(original).__name__
    if isinstance(error, IntegrityError | sqlite3.IntegrityError):
        return CatalogError(
            f"catalog {url} refused a change that breaks one of its rules ({text}); nothing was changed: "
            "run `ckptfmt db check` and report this",
            kind="catalog_rule",
        )
    code = sqlite_code(error)
    if code in _BUSY_CODES or (isinstance(error, DBAPIError) and error.connection_invalidated):
        return CatalogError(
            f"catalog {url} did not answer in time because another process is writing to it; nothing was "
            "established: repeat the call",
            kind="catalog_busy",
            transient=True,
        )
    if code == sqlite3.SQLITE_ERROR and "no such" in text:
        advice = "its schema is incomplete: run `ckptfmt db check`"
    else:
        advice = _ADVICE.get(code or 0, "run `ckptfmt db check`")
    # A full disk or a failed read may pass; a damaged or foreign file does not.
    transient = code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
    return CatalogError(f"catalog {url} failed ({text}): {advice}", kind="catalog", transient=transient)
