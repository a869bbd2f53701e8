"""The one place that maps what went wrong to an exit code; spec/cli-json.md has the table for users."""

from __future__ import annotations

from typing import Any

from ckptfmt.errors import (
    AccessDenied,
    BackendError,
    CatalogError,
    CkptError,
    Conflict,
    DrillFailed,
    FormatError,
    InvalidInput,
    NotFound,
    OutcomeUnknown,
    OutOfSpace,
    SaveFailed,
    Unavailable,
    UnsupportedValue,
    UnsupportedVersion,
)

OK = 0
BUG = 1
USAGE = 2
NOT_FOUND = 10
CONFLICT = 11
CORRUPT = 12
UNSUPPORTED_VERSION = 13
BACKEND = 14
CATALOG = 15
DRILL = 16
INTERRUPTED = 130
BROKEN_PIPE = 141

# The first class that fits: a derived class stands before its base.
_CODES: tuple[tuple[type[CkptError], int], ...] = (
    (InvalidInput, USAGE),
    (UnsupportedValue, USAGE),
    (NotFound, NOT_FOUND),
    (Conflict, CONFLICT),
    (UnsupportedVersion, UNSUPPORTED_VERSION),
    (FormatError, CORRUPT),
    (BackendError, BACKEND),
    (CatalogError, CATALOG),
    (DrillFailed, DRILL),
    (OutcomeUnknown, CATALOG),
    (SaveFailed, BACKEND),
)


def exit_code(error: BaseException) -> int:
    """The code for an error. A failed save has the code of its cause, where the cause is one of ours."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, BrokenPipeError) and not isinstance(error, CkptError):
        return BROKEN_PIPE
    if isinstance(error, SaveFailed) and isinstance(error.__cause__, CkptError):
        return exit_code(error.__cause__)
    return next((code for kind, code in _CODES if isinstance(error, kind)), BUG)


def problem_code(kind: str) -> int:
    """The code for a problem in a report, which has the error's ``kind``: a committed generation that cannot be read
    whole is corrupt, unless the storage or this version is to blame."""
    if kind == UnsupportedVersion.default_kind:
        return UNSUPPORTED_VERSION
    return BACKEND if kind in _BACKEND_KINDS else CORRUPT


_BACKEND_KINDS = frozenset(kind.default_kind for kind in (BackendError, Unavailable, AccessDenied, OutOfSpace))


def as_json(error: BaseException) -> dict[str, Any]:
    """The error as a program reads it."""
    known = isinstance(error, CkptError)
    details = {key: value for key, value in vars(error).items() if key not in _COMMON and not key.startswith("_")}
    if isinstance(error, BackendError):
        details["errno"] = error.errno
    return {
        "error": {
            "kind": error.kind if isinstance(error, CkptError) else "bug",
            "type": type(error).__name__,
            "message": str(error) if known else f"{type(error).__name__}: {error}",
            "exit_code": exit_code(error),
            "transient": error.transient if isinstance(error, CkptError) else False,
            "details": details if known else {},
        }
    }


_COMMON = frozenset({"message", "kind", "transient"})
