"""What a rebuild does to the database itself: judge it, keep it aside, and be alone with it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

from ckptfmt.catalog.database import database_of
from ckptfmt.catalog.failures import translated
from ckptfmt.catalog.location import display
from ckptfmt.catalog.queries import identity
from ckptfmt.catalog.revision import require_head, stored_revision
from ckptfmt.catalog.upgrade import examine
from ckptfmt.errors import CatalogError
from ckptfmt.ports.catalog import DAMAGED


@dataclass(frozen=True)
class Condition:
    """``why`` says what is wrong with a database that is not sound."""

    state: Literal["absent", "empty", "damaged", "sound"]
    why: str = ""


def condition(url: str) -> Condition:
    """Look at a catalog's database. Only what is broken, missing or changed of ours is damage.

    Raises ``CatalogError`` for a database of something else, or of another schema, and where nothing is established:
    it is locked, the disk fails, the server does not answer, or it may not be read.
    """
    database = database_of(url)
    if not database.exists():
        return Condition("absent")
    shown = display(url)
    try:
        with translated(shown), database.sessions("r").read() as snapshot:
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
    with translated(display(url)), database_of(url).sessions("r").read() as snapshot:
        return identity.other_repositories(snapshot, repository)


def set_aside(url: str) -> str | None:
    """Keep a database that is not sound under another name, and leave its place empty; None if there was none.

    ``CatalogError`` for a damaged one of a server: nothing is moved there that an operator has not looked at.
    """
    with translated(display(url)):
        return database_of(url).set_aside()


def exclusive(url: str) -> AbstractContextManager[None]:
    """Be the only one that rebuilds the catalog at ``url``. Who dies lets go.

    ``Conflict`` of the kind ``rebuild_running`` while somebody else is at it.
    """
    return database_of(url).exclusive()
