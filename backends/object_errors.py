"""What went wrong at an object store, and the one place where that becomes an error of ckptfmt."""

from __future__ import annotations

import enum
import re
from typing import Final

from ckptfmt.errors import (
    AccessDenied,
    BackendError,
    CkptError,
    Conflict,
    Corrupt,
    InvalidInput,
    NotFound,
    OutOfSpace,
    Unavailable,
)


class Cause(enum.Enum):
    """Kinds of failure, by what is known of the request afterwards."""

    ABSENT = "no such object"
    NO_BUCKET = "no such bucket"
    NO_UPLOAD = "no such multipart upload"
    TAKEN = "the condition that the key be free did not hold"
    DENIED = "access denied"
    RANGE = "the range lies behind the object's end"
    CLASH = "another write of the key is under way"
    BUSY = "the server is busy or failed; it may have done what was asked"
    LOST = "no answer; the server may have done what was asked"
    DAMAGED = "the bytes changed on their way; the server refused them"
    FULL = "no space"
    UNSUPPORTED = "the server does not implement it"
    INVALID = "the server calls the request invalid"
    OTHER = "something else"


PASSING: Final = frozenset({Cause.CLASH, Cause.BUSY, Cause.LOST, Cause.DAMAGED})
"""Causes after which the same request may succeed."""
UNKNOWN: Final = frozenset({Cause.BUSY, Cause.LOST})
"""Causes after which it is not known whether the request was carried out."""


class Failure(Exception):
    """A request to an object store that did not succeed. Never leaves the backends' rooms: see ``translate``."""

    def __init__(
        self,
        cause: Cause,
        words: str,
        *,
        status: int = 0,
        code: str = "",
        retry_after: float | None = None,
        size: int | None = None,
    ) -> None:
        super().__init__(words)
        self.cause = cause
        self.words = words
        self.status = status
        self.code = code
        self.retry_after = retry_after
        """Seconds, as the server asks."""
        self.size = size
        """Bytes of the whole object, where a refused range tells them."""


_ADVICE: Final = {
    Cause.ABSENT: "list the folder for the names",
    Cause.NO_BUCKET: "create the bucket, or check its name, the endpoint and the region",
    Cause.TAKEN: "objects are never overwritten: choose another name",
    Cause.DENIED: "check the credentials, the bucket's policy and this machine's clock",
    Cause.CLASH: "try again later",
    Cause.BUSY: "try again later, or raise retry_attempts and retry_seconds in storage_options",
    Cause.LOST: "check the network and the endpoint, and try again",
    Cause.DAMAGED: "the bytes changed on their way every time: check memory and network",
    Cause.NO_UPLOAD: "the multipart upload was aborted elsewhere: write the object again under a new name",
    Cause.FULL: "remove old generations with `ckptfmt gc`, or raise the quota",
    Cause.UNSUPPORTED: "this server lacks what ckptfmt needs: use another one",
    Cause.INVALID: "check endpoint, region, addressing and the key's length",
    Cause.OTHER: "look for the request in the server's log",
}


def translate(failure: Failure, operation: str, where: str, *, offset: int | None = None) -> CkptError:
    """Return what ``failure`` means for ``operation`` on ``where`` (an object's full URL)."""
    at = where if offset is None else f"{where} at offset {offset}"
    cause = failure.cause
    if cause is Cause.RANGE:
        return truncated(operation, where, offset or 0, None, failure.size)
    what = f"{operation} {at}: {failure.words}; {_ADVICE[cause]}"
    if cause in (Cause.ABSENT, Cause.NO_BUCKET):
        return NotFound(what, kind=None if cause is Cause.ABSENT else "no_bucket")
    if cause is Cause.TAKEN:
        return Conflict(what)
    if cause is Cause.DENIED:
        return AccessDenied(what)
    if cause is Cause.FULL:
        return OutOfSpace(what)
    if cause is Cause.NO_UPLOAD:
        return Unavailable(what, kind="upload_gone")
    if cause in PASSING:
        return Unavailable(what)
    if cause is Cause.INVALID and failure.code == "KeyTooLongError":
        return InvalidInput(f"{operation} {at}: {failure.words}; use a shorter run name or root")
    return BackendError(what, kind="unsupported" if cause is Cause.UNSUPPORTED else None)


def truncated(operation: str, where: str, offset: int, expected: int | None, size: int | None) -> Corrupt:
    """``size`` is that of the whole object, in bytes, where it is known."""
    wanted = "bytes" if expected is None else f"{expected} bytes"
    found = "fewer" if size is None else str(max(0, size - offset))
    return Corrupt(
        f"{operation} {where} at offset {offset}: expected {wanted}, found {found}; the object is truncated: verify "
        "the generation, and restore an older one or another copy",
        kind="truncated",
    )


# -- obstore ------------------------------------------------------------------------------------------
_STATUS: Final = re.compile(r"status(?: code)?: (\d{3})")
_RANGE: Final = re.compile(r"invalid range|StartTooLarge", re.IGNORECASE)
_QUERY: Final = re.compile(r"\?[^\s\"')]*")
_LOST: Final = re.compile(r"error sending request|timed? ?out|connect|reset|closed|incomplete|body|eof", re.IGNORECASE)


def from_obstore(error: Exception) -> Failure:
    """Return what an exception of obstore says. Query strings, where signatures stand, are left out of the words."""
    from obstore import exceptions

    words = _QUERY.sub("", str(error).splitlines()[0] if str(error) else type(error).__name__)[:300]
    for kind, cause in (
        (FileNotFoundError, Cause.ABSENT),
        (exceptions.AlreadyExistsError, Cause.TAKEN),
        (exceptions.PreconditionError, Cause.TAKEN),
        (exceptions.PermissionDeniedError, Cause.DENIED),
        (exceptions.UnauthenticatedError, Cause.DENIED),
        (exceptions.NotSupportedError, Cause.UNSUPPORTED),
        (exceptions.InvalidPathError, Cause.INVALID),
        (exceptions.UnknownConfigurationKeyError, Cause.INVALID),
    ):
        if isinstance(error, kind):
            return Failure(cause, words)
    found = _STATUS.search(str(error))
    if found:
        status = int(found[1])
        return Failure(cause_of_status(status), words, status=status)
    if _RANGE.search(str(error)):
        return Failure(Cause.RANGE, words)
    if isinstance(error, OSError | TimeoutError) or _LOST.search(str(error)):
        return Failure(Cause.LOST, words)
    return Failure(Cause.OTHER, words)


def cause_of_status(status: int) -> Cause:
    """What an HTTP status says where nothing else is known."""
    if status in (401, 403, 407):
        return Cause.DENIED
    exact = {
        404: Cause.ABSENT,
        408: Cause.LOST,
        409: Cause.CLASH,
        412: Cause.TAKEN,
        416: Cause.RANGE,
        429: Cause.BUSY,
        501: Cause.UNSUPPORTED,
        405: Cause.UNSUPPORTED,
        507: Cause.FULL,
    }
    if status in exact:
        return exact[status]
    if status >= 500:
        return Cause.BUSY
    return Cause.INVALID if status == 400 else Cause.OTHER
