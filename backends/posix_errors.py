"""The one place where an errno becomes an error of ckptfmt."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from ckptfmt.errors import (
    AccessDenied,
    BackendError,
    CkptError,
    Conflict,
    InvalidInput,
    NotFound,
    OutOfSpace,
    Unavailable,
)

NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_DENIED: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_ABSENT: Final = frozenset({errno.ENOENT, errno.ENOTDIR})
_TRY_AGAIN: Final = frozenset(
    {
        errno.EAGAIN,
        errno.EBUSY,
        errno.ECONNABORTED,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.EINTR,
        errno.EMFILE,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.ENFILE,
        errno.ENOBUFS,
        errno.ENOLCK,
        errno.ENOMEM,
        errno.ENOTCONN,
        errno.ESHUTDOWN,
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.ETXTBSY,
    }
)
_TOO_MANY_FILES: Final = frozenset({errno.EMFILE, errno.ENFILE})
_DENIED_ADVICE: Final = {
    errno.EROFS: "the file system is mounted read-only: remount it, or choose another place",
    errno.EACCES: "check the owner and mode of the file and of its folders",
    errno.EPERM: "check the owner, mode and attributes (immutable, append-only) of the file and of its folders",
}


@dataclass(frozen=True)
class Room:
    """What a file system has left: bytes, and files (None where it does not count them)."""

    nbytes: int
    files: int | None


def translate(
    error: OSError,
    operation: str,
    path: str,
    *,
    offset: int | None = None,
    needed: int | None = None,
    free: Callable[[], Room | None] | None = None,
) -> CkptError:
    """Return what ``error`` means for ``operation`` on ``path``.

    ``needed`` (bytes) and ``free`` (asked only when it matters) go into ``OutOfSpace``.
    """
    code = error.errno
    where = path if offset is None else f"{path} at offset {offset}"
    what = f"{operation} {where}: {_words(error)}"
    if code in NO_SPACE:
        return out_of_space(what, code, needed, free() if free is not None and code == errno.ENOSPC else None)
    if code in _DENIED:
        return AccessDenied(f"{what}; {_DENIED_ADVICE[code]}", errno=code)
    if code in _ABSENT:
        return NotFound(f"{what}; check that the repository is mounted and that the name is right")
    if code == errno.EEXIST:
        return Conflict(f"{what}; objects are never overwritten: choose another name")
    if code == errno.ENAMETOOLONG:
        return InvalidInput(f"{what}; use a shorter run name, or a repository root with a shorter path")
    if code == errno.ELOOP:
        return symlink_refused(operation, path)
    if code in _TOO_MANY_FILES:
        return Unavailable(f"{what}; raise the limit of open files (`ulimit -n`), or close some", errno=code)
    if code in _TRY_AGAIN:
        return Unavailable(f"{what}; try again later", errno=code)
    return _other(what, code)


def _other(what: str, code: int | None) -> BackendError:
    if code == errno.EIO:
        return BackendError(
            f"{what}; try again, and look for failing hardware or a lost server in the system log",
            errno=code,
            kind="io_error",
            transient=True,
        )
    if code == errno.EFBIG:
        return BackendError(
            f"{what}; raise the file size limit (`ulimit -f`), or choose a file system that holds larger files",
            errno=code,
            kind="file_too_large",
        )
    return BackendError(f"{what}; check the file system that holds it", errno=code)


def out_of_space(what: str, code: int | None, needed: int | None, free: Room | None) -> OutOfSpace:
    """Build the one message about room. ``needed`` is in bytes."""
    numbers = [f"needed {needed} bytes"] if needed is not None else []
    if code == errno.EDQUOT:
        numbers.append("the quota is used up")
    elif free is not None:
        numbers.append(f"free {free.nbytes} bytes{' but no inodes' if free.files == 0 else ''}")
    detail = f" ({', '.join(numbers)})" if numbers else ""
    return OutOfSpace(
        f"{what}{detail}; remove old generations with `ckptfmt gc`, or free other space there",
        needed=needed,
        free=None if free is None else free.nbytes,
        errno=code,
    )


def symlink_refused(operation: str, path: str) -> AccessDenied:
    return AccessDenied(
        f"{operation} {path}: a symbolic link below the repository's root is not followed; "
        "put the real folder there, or use a bind mount",
        errno=errno.ELOOP,
        kind="symlink_refused",
    )


def _words(error: OSError) -> str:
    name = errno.errorcode.get(error.errno, str(error.errno)) if error.errno is not None else "no errno"
    return f"{error.strerror or error} [{name}]"


@contextmanager
def translated(
    operation: str,
    path: str,
    *,
    needed: int | None = None,
    free: Callable[[], Room | None] | None = None,
) -> Iterator[None]:
    """Let no bare ``OSError`` out of the block."""
    try:
        yield
    except CkptError:
        raise
    except OSError as error:
        raise translate(error, operation, path, needed=needed, free=free) from error
