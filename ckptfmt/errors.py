"""The exception tree.

    CkptError(kind, transient)
    +-- InvalidInput (ValueError)          the call cannot be right: fix the arguments
    |   +-- Mismatch                       saved and live state differ; lists every difference
    +-- UnsupportedValue (TypeError)       a value that cannot be stored; names path and type
    +-- NotFound (LookupError)             no such repository, run, generation, tensor or object
    |   +-- NotCommitted                   the generation exists but was never committed
    +-- Conflict                           somebody else holds, or already wrote, what was asked for
    |   +-- Fenced                         a newer launch owns the run
    |   +-- CatalogBehind                  storage proves more than the catalog knows
    +-- FormatError                        bytes that are not this format
    |   +-- UnsupportedVersion             written by a newer, incompatible version
    |   +-- Corrupt                        bytes that differ from their recorded digest or length
    |   +-- Unverifiable                   no digest, or one of an unknown algorithm
    +-- BackendError (OSError)             the storage said no
    |   +-- Unavailable                    try again later
    |   +-- AccessDenied                   credentials, permissions, read-only file systems
    |   +-- OutOfSpace                     needed and free bytes are in the message
    +-- CatalogError                       the SQL catalog said no
    +-- SaveFailed(stage, rank, key, generation_id)
    |   +-- OutcomeUnknown                 neither committed nor aborted could be established
    +-- DrillFailed                        a restore drill did not reproduce the saved bytes

``kind`` is a stable, append-only code for programs; ``transient`` says whether the same call may
succeed later. Every error pickles with all its attributes.
"""

from __future__ import annotations

from typing import Any, ClassVar

__all__ = [
    "AccessDenied",
    "BackendError",
    "CatalogBehind",
    "CatalogError",
    "CkptError",
    "Conflict",
    "Corrupt",
    "DrillFailed",
    "Fenced",
    "FormatError",
    "InvalidInput",
    "Mismatch",
    "NotCommitted",
    "NotFound",
    "OutOfSpace",
    "OutcomeUnknown",
    "SaveFailed",
    "Unavailable",
    "UnsupportedValue",
    "UnsupportedVersion",
    "Unverifiable",
]


class CkptError(Exception):
    """Base of every error that ckptfmt raises on purpose."""

    default_kind: ClassVar[str] = "error"
    default_transient: ClassVar[bool] = False

    def __init__(self, message: str, *, kind: str | None = None, transient: bool | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.kind = kind if kind is not None else self.default_kind
        self.transient = transient if transient is not None else self.default_transient

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        # BaseException's own reduce replays only ``args``, which would lose keyword attributes.
        return _rebuild, (type(self), self.message, dict(self.__dict__))


def _rebuild(cls: type[CkptError], message: str, attributes: dict[str, Any]) -> CkptError:
    error = cls.__new__(cls, message)
    Exception.__init__(error, message)
    for name, value in attributes.items():
        setattr(error, name, value)
    return error


class InvalidInput(CkptError, ValueError):
    """The call cannot be right."""

    default_kind = "invalid_input"


class Mismatch(InvalidInput):
    """Saved and live state differ. ``problems`` lists every difference, one line each."""

    default_kind = "mismatch"

    def __init__(self, message: str, problems: tuple[str, ...] = (), *, kind: str | None = None) -> None:
        super().__init__(message, kind=kind)
        self.problems = tuple(problems)

    def __str__(self) -> str:
        return "\n  ".join([self.message, *self.problems])


class UnsupportedValue(CkptError, TypeError):
    """A value that the format cannot store, or this process cannot rebuild."""

    default_kind = "unsupported_value"


class NotFound(CkptError, LookupError):
    """No such repository, run, generation, tensor or object."""

    default_kind = "not_found"


class NotCommitted(NotFound):
    """The generation exists, but it was never committed (or is committed no longer)."""

    default_kind = "not_committed"


class Conflict(CkptError):
    """Somebody else holds, or has already written, what was asked for."""

    default_kind = "conflict"


class Fenced(Conflict):
    """A newer launch owns the run, or its catalog was rebuilt since: this process must stop saving to it."""

    default_kind = "fenced"


class CatalogBehind(Conflict):
    """Storage proves a commit that the catalog does not know."""

    default_kind = "catalog_behind"


class FormatError(CkptError):
    """Bytes that are not this format."""

    default_kind = "format"


class UnsupportedVersion(FormatError):
    """Written by a newer, incompatible version of the format."""

    default_kind = "unsupported_version"


class Corrupt(FormatError):
    """Bytes that differ from their recorded digest or length. Names the object, tensor and file offset where known."""

    default_kind = "corrupt"

    def __init__(
        self,
        message: str,
        *,
        object: str | None = None,
        tensor: str | None = None,
        offset: int | None = None,
        kind: str | None = None,
    ) -> None:
        super().__init__(message, kind=kind)
        self.object = object
        self.tensor = tensor
        self.offset = offset


class Unverifiable(FormatError):
    """No digest is recorded, or its algorithm is unknown here."""

    default_kind = "unverifiable"


class BackendError(CkptError, OSError):
    """The storage said no. ``errno`` is the system's code where there is one."""

    default_kind = "backend"

    def __init__(
        self,
        message: str,
        *,
        errno: int | None = None,
        kind: str | None = None,
        transient: bool | None = None,
    ) -> None:
        CkptError.__init__(self, message, kind=kind, transient=transient)
        self.errno = errno

    def __reduce__(self) -> tuple[Any, ...]:
        rebuild, (cls, message, attributes) = super().__reduce__()
        return rebuild, (cls, message, {**attributes, "errno": self.errno})  # OSError keeps it outside __dict__


class Unavailable(BackendError):
    """The storage did not answer, or has lost sight of an object: try again later."""

    default_kind = "unavailable"
    default_transient = True


class AccessDenied(BackendError):
    """Credentials, permissions, or a read-only file system."""

    default_kind = "access_denied"


class OutOfSpace(BackendError):
    """Not enough room. ``needed`` and ``free`` are bytes, where known."""

    default_kind = "out_of_space"

    def __init__(
        self,
        message: str,
        *,
        needed: int | None = None,
        free: int | None = None,
        errno: int | None = None,
        kind: str | None = None,
    ) -> None:
        super().__init__(message, errno=errno, kind=kind)
        self.needed = needed
        self.free = free


class CatalogError(CkptError):
    """The SQL catalog said no."""

    default_kind = "catalog"


class SaveFailed(CkptError):
    """A save was not committed.

    ``stage`` is the stage in which it failed, ``rank`` the rank that failed or stayed silent,
    ``key`` and ``generation_id`` name the generation (id None: it never got one).
    """

    default_kind = "save_failed"

    def __init__(
        self,
        message: str,
        *,
        stage: str,
        rank: int | None = None,
        key: str | None = None,
        generation_id: int | None = None,
        kind: str | None = None,
    ) -> None:
        super().__init__(message, kind=kind)
        self.stage = stage
        self.rank = rank
        self.key = key
        self.generation_id = generation_id


class OutcomeUnknown(SaveFailed):
    """Neither committed nor aborted could be established; nothing was deleted."""

    default_kind = "outcome_unknown"


class DrillFailed(CkptError):
    """A restore drill did not reproduce the saved bytes."""

    default_kind = "drill_failed"
