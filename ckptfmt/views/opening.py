"""How a view reads, and how one is made again in another process."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

from ckptfmt import connect
from ckptfmt.engine import process, verdicts
from ckptfmt.engine.nearest import Copy
from ckptfmt.engine.opened import Opened, open_proven
from ckptfmt.engine.site import Site
from ckptfmt.engine.tiers import Role, Tier, Tiers
from ckptfmt.errors import CkptError, Corrupt, InvalidInput, NotFound
from ckptfmt.format import layout
from ckptfmt.views.box_bytes import BoxBytes, MappedBytes, UnverifiedBytes, VerifiedBytes

log = logging.getLogger("ckptfmt")


@dataclass(frozen=True)
class Reading:
    """``mmap`` shows packs of local file systems without a copy; ``verify`` compares chunks with their digests."""

    mmap: bool = False
    verify: bool = True

    def require_possible(self, opened: Opened) -> None:
        """``InvalidInput`` where nothing can be mapped."""
        tiers = opened.nearest.tiers
        if self.mmap and not any(Copy(tier, "").path for tier in tiers):
            raise InvalidInput(
                f"{', '.join(tier.backend.url for tier in tiers)} is not on a local file system: a page that does not "
                "come would end the process; leave out mmap=True"
            )

    def of(self, opened: Opened) -> BoxBytes:
        """What reads the boxes of ``opened`` so; what cannot be mapped is read."""
        read = VerifiedBytes(opened) if self.verify else UnverifiedBytes(opened)
        return MappedBytes(opened, read, verify=self.verify) if self.mmap else read


def held(view: Any, guard: AbstractContextManager[None] | None) -> weakref.finalize[Any, Any]:
    """Enter ``guard``, to be left when what is returned is called or ``view`` is forgotten, whichever comes first."""
    stack = ExitStack()
    if guard is not None:
        stack.enter_context(guard)
    return weakref.finalize(view, stack.close)


class TierPlace(NamedTuple):
    """Where a tier lies, as another process finds it."""

    uuid: str
    role: Role
    url: str
    storage_options: dict[str, Any]
    host: str | None


def places_of(opened: Opened) -> list[TierPlace]:
    """The tiers beside the durable one."""
    return [
        TierPlace(tier.uuid, tier.role, tier.backend.url, dict(tier.backend.storage_options), tier.host)
        for tier in opened.site.tiers.every()
    ]


def reopened(
    url: str, folder: str, key: str, storage_options: Mapping[str, Any], tiers: Sequence[TierPlace] = ()
) -> Opened:
    """The generation ``key`` in ``folder`` of the root at ``url``, by what storage proves. Packs are read from those of
    ``tiers``, too, that this host has.

    ``NotFound``, ``NotCommitted`` and ``Corrupt`` as every reader without a catalog meets them.
    """
    backend = connect.backend_for(url, storage_options)
    with connect.closed_on_error(backend):
        commit = verdicts.read_commit(backend, folder)
        if commit is None:
            raise NotFound(f"{url}: {folder or 'the folder'} has no {layout.COMMIT}: no generation was committed there")
        if commit.key != key:
            raise Corrupt(
                f"{url}: {folder or 'the folder'} holds generation {commit.key}, expected {key}", object=folder
            )
        here = _tiers_here(tiers)
        with connect.closed_on_error(here):
            return open_proven(Site("", backend, None, read_only=True, tiers=here), folder, commit)


def _tiers_here(places: Sequence[TierPlace]) -> Tiers:
    """Nobody is asked before something is to be read there: what a tier lacks, or another place holds by now, its
    digest tells."""
    found = []
    for place in places:
        if place.role == "stage" and place.host != process.host_name():
            continue
        try:
            backend = connect.backend_for(place.url, place.storage_options)
        except CkptError as error:
            log.warning("nothing is read from the %s %s: %s", place.role, place.url, error)
        else:
            found.append(Tier(place.uuid, place.role, backend, place.host))
    stage = next((tier for tier in found if tier.role == "stage"), None)
    return Tiers(stage, tuple(tier for tier in found if tier.role == "replica"))
