"""The one place where database exceptions become ``CatalogError``."""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, cast

from ckptfmt.catalog.location import sqlite_path
from ckptfmt.catalog.shortage import Shortage, behind_a_refusal, no_room
from ckptfmt.errors import CatalogError
from ckptfmt.ports.catalog import DAMAGED

if TYPE_CHECKING:
    import psycopg

_BUSY_CODES: Final = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
_ADVICE: Final = {
    sqlite3.SQLITE_READONLY: "the file or its folder is read-only: check its permissions and the mount",
    sqlite3.SQLITE_PERM: "permission was denied: check the file's owner and mode",
    sqlite3.SQLITE_CANTOPEN: "the file cannot be opened: check that it and its folder exist and may be written",
    sqlite3.SQLITE_IOERR: "the disk failed: check the system log, then run `ckptfmt db check`",
    sqlite3.SQLITE_CORRUPT: "the file is damaged: rebuild it from storage, `ckptfmt db rebuild` keeps it aside",
    sqlite3.SQLITE_NOTADB: (
        "the file is not a SQLite database: check the URL, or rebuild it from storage: `ckptfmt db rebuild`"
    ),
}
_KINDS: Final = {
    sqlite3.SQLITE_CORRUPT: DAMAGED,
    sqlite3.SQLITE_NOTADB: DAMAGED,
    sqlite3.SQLITE_READONLY: "catalog_read_only",
    sqlite3.SQLITE_IOERR: "catalog_io",
}


def sqlite_code(error: BaseException) -> int | None:
    """Return the primary SQLite result code of a driver or SQLAlchemy error, if it carries one."""
    code = _full_code(error)
    return None if code is None else code & 0xFF


def _full_code(error: BaseException) -> int | None:
    """The extended result code (https://sqlite.org/rescode.html)."""
    code = getattr(_driver_error(error), "sqlite_errorcode", None)
    return code if isinstance(code, int) else None


def is_busy(error: BaseException) -> bool:
    """Whether another connection holds the lock: the same call may succeed later."""
    return sqlite_code(error) in _BUSY_CODES


@contextmanager
def translated(url: str) -> Iterator[None]:
    """Raise ``CatalogError`` in place of any SQLAlchemy or driver exception; the cause is chained."""
    try:
        yield
    except Exception as error:
        of_postgres = _of_psycopg(error)
        if of_postgres is not None:
            from ckptfmt.catalog.postgres_failures import translate

            raise translate(of_postgres, url) from error
        if not isinstance(error, sqlite3.Error) and not _of_sqlalchemy(error):
            raise
        raise _translate(error, url) from error


def _of_sqlalchemy(error: BaseException) -> bool:
    return _is_of("sqlalchemy.exc", "SQLAlchemyError", error)


def _of_psycopg(error: BaseException) -> psycopg.Error | None:
    original = _driver_error(error)
    return cast("psycopg.Error", original) if _is_of("psycopg", "Error", original) else None


def _is_of(module: str, name: str, error: BaseException) -> bool:
    """Asked without importing it: who has not loaded a driver, or SQLAlchemy, gets none of its errors."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(error, getattr(loaded, name))


def _driver_error(error: BaseException) -> BaseException:
    """What the driver raised, where SQLAlchemy wrapped it."""
    wrapped = getattr(error, "orig", None) if _of_sqlalchemy(error) else None
    return wrapped if isinstance(wrapped, BaseException) else error


def _translate(error: Exception, url: str) -> CatalogError:
    original = _driver_error(error)
    text = str(original).strip() or type(original).__name__
    if isinstance(original, sqlite3.IntegrityError):
        return CatalogError(
            f"catalog {url} refused a change that breaks one of its rules ({text}); nothing was changed: "
            "run `ckptfmt db check` and report this",
            kind="catalog_rule",
        )
    code = sqlite_code(error)
    if code in _BUSY_CODES or getattr(error, "connection_invalidated", False):
        return CatalogError(
            f"catalog {url} did not answer in time because another process is writing to it; nothing was "
            "established: repeat the call",
            kind="catalog_busy",
            transient=True,
        )
    shortage = _shortage(code, url)
    if shortage is not None:
        return CatalogError(
            f"catalog {url} failed ({text}): {shortage.advice}", kind=shortage.kind, transient=shortage.transient
        )
    incomplete = code == sqlite3.SQLITE_ERROR and "no such" in text
    if incomplete:
        advice = "its schema is incomplete: run `ckptfmt db check`"
    elif _full_code(error) == sqlite3.SQLITE_IOERR_WRITE:  # so SQLite calls EDQUOT, too
        advice = f"check the quota; {_ADVICE[sqlite3.SQLITE_IOERR]}"
    else:
        advice = _ADVICE.get(code or 0, "run `ckptfmt db check`")
    # A failed read may pass. A full disk does not by itself, and a damaged or foreign file never.
    transient = code == sqlite3.SQLITE_IOERR
    kind = DAMAGED if incomplete else _KINDS.get(code or 0, "catalog")
    if _full_code(error) == sqlite3.SQLITE_READONLY_DBMOVED:
        kind = "catalog"
    return CatalogError(f"catalog {url} failed ({text}): {advice}", kind=kind, transient=transient)


def _shortage(code: int | None, url: str) -> Shortage | None:
    """What the system lacks, where that is the reason."""
    if code not in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN):
        return None
    path = sqlite_path(url)
    return no_room(path.parent) if code == sqlite3.SQLITE_FULL else behind_a_refusal(path)
