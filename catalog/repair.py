"""What a rebuild does to the database file itself: judge it, keep it aside, and be alone with it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from ckptfmt.catalog.failures import translated
from ckptfmt.catalog.location import display, sqlite_path
from ckptfmt.catalog.queries import identity
from ckptfmt.catalog.revision import require_head, stored_revision
from ckptfmt.catalog.sqlite import SqliteSessions
from ckptfmt.catalog.upgrade import examine, sync_folder
from ckptfmt.errors import CatalogError, Conflict
from ckptfmt.ports.catalog import DAMAGED

_SIDECARS: Final = ("", "-journal", "-wal", "-shm")
"""What SQLite keeps beside a database. A journal that is left behind would be rolled back into the next one."""


@dataclass(frozen=True)
class Condition:
    """``why`` says what is wrong with a database that is not sound."""

    state: Literal["absent", "empty", "damaged", "sound"]
    why: str = ""


def condition(url: str) -> Condition:
    """Look at a catalog's file. Only what is broken, missing or changed of ours is damage.

    Raises ``CatalogError`` for a database of something else, or of another schema, and where nothing is established:
    it is locked, the disk fails, or it may not be read.
    """
    path = sqlite_path(url)
    if not path.exists():
        return Condition("absent")
    shown = display(url)
    try:
        with translated(shown), SqliteSessions(path, mode="ro").read() as snapshot:
            revision = stored_revision(snapshot, shown)
            if revision is None:
                return Condition("empty", "it holds nothing")
            require_head(revision, shown)
            identity.identity(snapshot)
        damage = [problem.text for problem in examine(url) if not problem.foreign]
    except CatalogError as error:
        if error.kind != DAMAGED:
            raise
        return Condition("damaged", str(error))
    return Condition("damaged", "; ".join(damage)) if damage else Condition("sound")


def other_repositories(url: str, repository: str) -> list[str]:
    """URLs of the other repositories that a sound catalog serves."""
    with translated(display(url)), SqliteSessions(sqlite_path(url), mode="ro").read() as snapshot:
        return identity.other_repositories(snapshot, repository)


def set_aside(url: str) -> Path | None:
    """Give the database, with what SQLite keeps beside it, another name in its folder; None if there was none.

    Nothing is opened, and nothing is deleted.
    """
    path = sqlite_path(url)
    number = 1
    while any(_sidecar(_aside(path, number), end).exists() for end in _SIDECARS):
        number += 1
    target = _aside(path, number)
    moved = False
    for end in _SIDECARS:  # the database first: without it a journal does nothing
        source = _sidecar(path, end)
        if source.is_symlink() or source.exists():
            os.rename(source, _sidecar(target, end))
            moved = True
    if moved:
        sync_folder(path.parent)
    return target if moved else None


def _aside(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.aside-{number}")


def _sidecar(path: Path, end: str) -> Path:
    return path.with_name(f"{path.name}{end}")


@contextmanager
def exclusive(url: str) -> Iterator[None]:
    """Be the only one on this host that rebuilds the catalog at ``url``. The kernel lets go when the process ends.

    ``Conflict`` of the kind ``rebuild_running`` while somebody else is at it.
    """
    folder = sqlite_path(url).parent
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise CatalogError(
            f"the folder of the catalog {display(url)} cannot be opened ({error.strerror}): create {folder}"
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Conflict(
                f"another process is rebuilding the catalog {display(url)} now: wait for it and look at its result",
                kind="rebuild_running",
            ) from None
        yield
    finally:
        os.close(descriptor)
