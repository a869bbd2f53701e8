"""What PostgreSQL's and psycopg's errors mean for a catalog, by SQLSTATE.

Codes: https://www.postgresql.org/docs/current/errcodes-appendix.html. A connection that could not be made brings no
code, only a text of libpq or of the server: what is known to be lasting is looked for there, and all else is taken
for passing, which costs no more than a bounded wait.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import psycopg

from ckptfmt.errors import CatalogError
from ckptfmt.ports.catalog import DAMAGED

UNREACHABLE: Final = "catalog_unreachable"
"""Kind of the error that says: the server did not answer."""


@dataclass(frozen=True)
class _Meaning:
    kind: str
    advice: str
    transient: bool = False


_BUSY = _Meaning("catalog_busy", "nothing was established: repeat the call", transient=True)
_GONE = _Meaning(
    UNREACHABLE, "nothing is established: look at the server and the network, and repeat the call", transient=True
)
_CROWDED = _Meaning(
    "catalog_busy", "it has no connection to spare: raise max_connections, or use pgbouncer", transient=True
)
_LOGIN = _Meaning(
    "catalog_access", "check user, password (URL, PGPASSWORD or ~/.pgpass), pg_hba.conf and the TLS settings"
)
_ABSENT = _Meaning("catalog_missing", "make the database (`createdb`), or check its name in the URL")
_DENIED = _Meaning("catalog_read_only", "grant the role the rights to the schema and its tables")
_INCOMPLETE = _Meaning(DAMAGED, "its schema is incomplete: run `ckptfmt db check`")
_DAMAGED = _Meaning(DAMAGED, "the server says that it is damaged: restore a backup, or rebuild it from storage")
_RULE = _Meaning(
    "catalog_rule", "it breaks one of the catalog's rules; nothing was changed: run `ckptfmt db check` and report this"
)
_FULL = _Meaning("catalog_full", "the server's disk is full: free space there, for instance with `ckptfmt gc`")
_READ_ONLY = _Meaning(
    "catalog_read_only", "the server takes no changes now (default_transaction_read_only): name the one that does"
)
_VALUE = _Meaning("catalog_value", "a value does not fit its column: check run names, tags, steps and sizes")
_DISK = _Meaning("catalog_io", "the server's disk failed: look at its log", transient=True)
_OTHER = _Meaning("catalog", "run `ckptfmt db check`, and look at the server's log")

# The longest beginning of a code decides.
_BY_STATE: Final = {
    "08": _GONE,
    "22": _VALUE,
    "23": _RULE,
    "25006": _READ_ONLY,
    "25P03": _GONE,  # idle_in_transaction_session_timeout: this process stood still, and its session was ended
    "25P04": _GONE,
    "28": _LOGIN,
    "3D000": _ABSENT,
    "3F000": _Meaning("catalog_missing", "the search_path of the role names no schema: create one, or set it"),
    "40": _BUSY,
    "42501": _DENIED,
    "42703": _INCOMPLETE,
    "42883": _INCOMPLETE,
    "42P01": _INCOMPLETE,
    "53": _Meaning("catalog_busy", "the server is short of resources: look at its log", transient=True),
    "53100": _FULL,
    "53300": _CROWDED,
    "55P03": _Meaning(
        "catalog_busy", "another transaction kept a row locked; nothing was established: repeat the call", True
    ),
    "57014": _Meaning("catalog_busy", "it took too long and was given up; nothing was established", True),
    "57P": _GONE,
    "57P04": _ABSENT,
    "58": _DISK,
    "XX001": _DAMAGED,
    "XX002": _DAMAGED,
}

# What a server or libpq says, in English, when it will say the same the next time.
_LASTING: Final = (
    (re.compile(r"database \"[^\"]*\" does not exist"), _ABSENT),
    (
        re.compile(
            r"authentication failed|no password supplied|no pg_hba\.conf entry|role \"[^\"]*\" does not exist"
            r"|not permitted to log in|permission denied for database|certificate|SSL was required|SSL is not enabled"
            r"|server does not support SSL|authentication method"
        ),
        _LOGIN,
    ),
    (
        re.compile(r"invalid (?:port number|integer value|value for|\w+ value)"),
        _Meaning("catalog_url", "check the URL"),
    ),
    (re.compile(r"too many clients|connection slots|too many connections"), _CROWDED),
)


def translate(error: psycopg.Error, url: str) -> CatalogError:
    """The ``CatalogError`` for an error of the driver. ``url`` is for display."""
    state = error.sqlstate
    meaning = _by_state(state) if state is not None else _without_state(error)
    text = error.diag.message_primary or str(error).strip() or type(error).__name__
    code = f", SQLSTATE {state}" if state is not None else ""
    return CatalogError(
        f"catalog {url} failed ({' '.join(text.split())}{code}): {meaning.advice}",
        kind=meaning.kind,
        transient=meaning.transient,
    )


def _by_state(state: str) -> _Meaning:
    for length in range(len(state), 1, -1):
        if state[:length] in _BY_STATE:
            return _BY_STATE[state[:length]]
    return _OTHER


def _without_state(error: psycopg.Error) -> _Meaning:
    if isinstance(error, psycopg.OperationalError):
        text = str(error)
        return next((meaning for pattern, meaning in _LASTING if pattern.search(text)), _GONE)
    if isinstance(error, psycopg.DataError):  # a text with a NUL, which the driver itself refuses
        return _VALUE
    # The connection went while it was in use, and the driver says that it is closed.
    return _GONE if isinstance(error, psycopg.InterfaceError) else _OTHER
