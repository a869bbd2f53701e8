"""The one place where what an fsspec file system raises becomes an error of ckptfmt.

Implementations raise builtin errors, HTTP clients' errors or those of a provider's library, often one as the cause of
another. What lies deepest knows most: ``info`` of fsspec's HTTP file system says ``FileNotFoundError`` of a server that
cannot be reached, and the cause tells.
"""

from __future__ import annotations

import errno
import re
from typing import Any, Final, Literal

from ckptfmt.errors import AccessDenied, BackendError, CkptError, Conflict, NotFound, OutOfSpace, Unavailable

Meaning = Literal["absent", "taken", "denied", "space", "busy", "beyond the end", "unsupported", "unknown"]

_CAUSES_MAX: Final = 8
_PASSWORD: Final = re.compile(r"(://[^/@:\s]*):[^/\s]*@")
_QUERY: Final = re.compile(r"(://[^\s?'\"<>]*)\?[^\s'\"<>)]*")

_STATUS: Final[dict[int, Meaning]] = {
    401: "denied",
    403: "denied",
    404: "absent",
    407: "denied",
    408: "busy",
    409: "busy",  # another conditional request for the key is under way
    410: "absent",
    412: "taken",
    413: "space",
    416: "beyond the end",
    425: "busy",
    429: "busy",
    501: "unsupported",
    507: "space",
}
_ERRNO: Final[dict[int, Meaning]] = {
    errno.ENOSPC: "space",
    errno.EDQUOT: "space",
    errno.EROFS: "denied",
    errno.ENOSYS: "unsupported",
    errno.EOPNOTSUPP: "unsupported",
    **dict.fromkeys(
        (
            errno.EAGAIN,
            errno.EBUSY,
            errno.EHOSTDOWN,
            errno.EHOSTUNREACH,
            errno.EMFILE,
            errno.ENETDOWN,
            errno.ENETUNREACH,
            errno.ENFILE,
            errno.ENOBUFS,
            errno.ENOTCONN,
            errno.EREMOTEIO,
            errno.ESTALE,
        ),
        "busy",
    ),
}
_TYPES: Final[tuple[tuple[type[BaseException], Meaning], ...]] = (
    (FileExistsError, "taken"),
    (FileNotFoundError, "absent"),
    (NotADirectoryError, "absent"),
    (IsADirectoryError, "absent"),
    (PermissionError, "denied"),
    (TimeoutError, "busy"),
    (ConnectionError, "busy"),
    (EOFError, "busy"),  # paramiko's word for a connection that was closed
    (NotImplementedError, "unsupported"),
)
_NAMES: Final[dict[str, Meaning]] = {
    # paramiko
    "AuthenticationException": "denied",
    "BadHostKeyException": "denied",
    "SSHException": "busy",
    # asyncssh
    "SFTPNoSuchFile": "absent",
    "SFTPNoSuchPath": "absent",
    "SFTPFileAlreadyExists": "taken",
    "SFTPPermissionDenied": "denied",
    "SFTPWriteProtect": "denied",
    "SFTPNoSpaceOnFilesystem": "space",
    "SFTPQuotaExceeded": "space",
    "SFTPOpUnsupported": "unsupported",
    "SFTPNoConnection": "busy",
    "SFTPConnectionLost": "busy",
    "PermissionDenied": "denied",
    "HostKeyNotVerifiable": "denied",
    "DisconnectError": "busy",
    "ChannelOpenError": "busy",
    # botocore, aiohttp, requests, urllib3, google, azure
    "NoCredentialsError": "denied",
    "PartialCredentialsError": "denied",
    "CredentialRetrievalError": "denied",
    "DefaultCredentialsError": "denied",
    "HTTPClientError": "busy",
    "FlexibleChecksumError": "busy",
    "ClientConnectionError": "busy",
    "ClientPayloadError": "busy",
    "RequestException": "busy",
    "ServiceRequestError": "busy",
    "ServiceResponseError": "busy",
    "gaierror": "busy",
}
"""By name, since none of these libraries is imported here. A name stands for the classes derived from it, too."""

_ADVICE: Final[dict[Meaning, str]] = {
    "absent": "check the URL and the name",
    "taken": "objects are never overwritten: choose another name",
    "denied": "check the credentials in storage_options and what they allow",
    "space": "remove old generations with `ckptfmt gc`, or free other space there",
    "busy": "try again later",
    "beyond the end": "the object is shorter than expected: verify the generation",
    "unsupported": "this file system cannot do that; use another one for this repository",
    "unknown": "see the cause above",
}


class Taken(Exception):
    """A name holds an object already: what that holds is for whoever wanted to create it to look at."""


def meaning(error: BaseException) -> Meaning:
    """What ``error`` says, by the deepest of its causes that says anything."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and len(chain) < _CAUSES_MAX:
        chain.append(current)
        current = current.__cause__
    for link in reversed(chain):
        found = _meaning_of_one(link)
        if found != "unknown":
            return found
    return "unknown"


def _meaning_of_one(error: BaseException) -> Meaning:
    status = _status(error)
    if status in _STATUS:
        return _STATUS[status]
    if status >= 500:
        return "busy"
    for kind, found in _TYPES:
        if isinstance(error, kind):
            return found
    if isinstance(error, OSError) and error.errno in _ERRNO:
        return _ERRNO[error.errno]
    for cls in type(error).__mro__:
        if cls.__name__ in _NAMES:
            return _NAMES[cls.__name__]
    return "unknown"


def _status(error: BaseException) -> int:
    """The HTTP status that the error of whichever client carries; 0 where it has none."""
    response: Any = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        facts = response.get("ResponseMetadata")
        return _as_status(facts.get("HTTPStatusCode") if isinstance(facts, dict) else None)
    # requests and huggingface_hub; aiohttp; azure; gcsfs. In this order: aiohttp warns of its own ``code``.
    found = _as_status(getattr(response, "status_code", None))
    for name in ("status", "status_code", "code"):
        found = found or _as_status(getattr(error, name, None))
    return found


def _as_status(value: Any) -> int:
    return value if isinstance(value, int) and 100 <= value < 600 else 0


def without_passwords(text: str) -> str:
    """``text`` without the passwords of the URLs in it."""
    return _PASSWORD.sub(r"\1@", text)


def without_secrets(words: str) -> str:
    """What a library says, without the passwords and the queries of URLs: there stand signatures as good as keys."""
    return _QUERY.sub(r"\1", without_passwords(words))


def translate(error: BaseException, operation: str, where: str, *, offset: int | None = None) -> CkptError:
    """Return what ``error`` means for ``operation`` on ``where``, an object's URL."""
    said = meaning(error)
    at = where if offset is None else f"{where} at offset {offset}"
    words = without_secrets(str(error).strip()) or type(error).__name__
    text = f"{operation} {at}: {words} [{type(error).__name__}]; {_ADVICE[said]}"
    code = error.errno if isinstance(error, OSError) and isinstance(error.errno, int) else None
    if said == "absent":
        return NotFound(text)
    if said == "taken":
        return Conflict(text)
    if said == "denied":
        return AccessDenied(text, errno=code)
    if said == "space":
        return OutOfSpace(text, errno=code)
    if said == "busy":
        return Unavailable(text, errno=code)
    return BackendError(text, errno=code, kind="unsupported" if said == "unsupported" else None)
