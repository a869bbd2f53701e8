"""How a view reads, and how one is made again in another process."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

from ckptfmt import connect
from ckptfmt.engine import verdicts
from ckptfmt.engine.opened import Opened, open_proven
from ckptfmt.engine.roots import root_path
from ckptfmt.engine.site import Site
from ckptfmt.errors import Corrupt, InvalidInput, NotFound
from ckptfmt.format import layout
from ckptfmt.views.box_bytes import BoxBytes, MappedBytes, UnverifiedBytes, VerifiedBytes


@dataclass(frozen=True)
class Reading:
    """``mmap`` shows packs of a local file system without a copy; ``verify`` compares chunks with their digests."""

    mmap: bool = False
    verify: bool = True

    def of(self, opened: Opened) -> BoxBytes:
        """What reads the boxes of ``opened`` so. ``InvalidInput`` where nothing can be mapped."""
        backend = opened.site.backend
        if self.mmap:
            if not (backend.traits.local and backend.url.startswith("file:")):
                raise InvalidInput(
                    f"{backend.url} is not on a local file system: a page that does not come would end the process; "
                    "leave out mmap=True"
                )
            root = root_path(backend.url)
            return MappedBytes(lambda key: root / key, verify=self.verify)
        return VerifiedBytes(backend) if self.verify else UnverifiedBytes(backend)


def held(view: Any, guard: AbstractContextManager[None] | None) -> weakref.finalize[Any, Any]:
    """Enter ``guard``, to be left when what is returned is called or ``view`` is forgotten, whichever comes first."""
    stack = ExitStack()
    if guard is not None:
        stack.enter_context(guard)
    return weakref.finalize(view, stack.close)


def reopened(url: str, folder: str, key: str) -> Opened:
    """The generation ``key`` in ``folder`` of the root at ``url``, by what storage proves.

    ``NotFound``, ``NotCommitted`` and ``Corrupt`` as every reader without a catalog meets them.
    """
    backend = connect.backend_for(url)
    commit = verdicts.read_commit(backend, folder)
    if commit is None:
        raise NotFound(f"{url}: {folder or 'the folder'} has no {layout.COMMIT}: no generation was committed there")
    if commit.key != key:
        raise Corrupt(f"{url}: {folder or 'the folder'} holds generation {commit.key}, expected {key}", object=folder)
    return open_proven(Site("", backend, None, read_only=True), folder, commit)
