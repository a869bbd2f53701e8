"""Whether two roots are one place, or one is a copy of the other."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from ckptfmt.engine.governing import governing_claim
from ckptfmt.engine.marker import read_marker
from ckptfmt.engine.site import Site
from ckptfmt.errors import CkptError, Conflict
from ckptfmt.ports.backend import Backend
from ckptfmt.ports.catalog import Catalog

log = logging.getLogger("ckptfmt")

EMBEDDED_CATALOG: Final = "catalog.sqlite"


def embedded_path(backend: Backend) -> Path:
    return root_path(backend.url) / EMBEDDED_CATALOG


def root_path(url: str) -> Path:
    """The folder of a ``file:`` URL."""
    return Path(unquote(urlsplit(url).path))


def require_not_copied(
    site: Site, sql: Catalog, known: str, *, embedded: bool, open_place: Callable[[str], Backend]
) -> None:
    """A root that was copied must not write to the catalog of the original, whose URL is ``known`` there
    (spec/decisions/010-copied-roots.md).

    ``embedded``: the catalog lies in the root. A copy of such a one is a file of its own, through which nothing of the
    original can be reached.
    """
    if not _governs_elsewhere(site, sql, known, open_place):
        return
    if embedded and not is_same_catalog_file(known, site.backend):
        log.warning(
            "%s is a copy of %s, which is still there: `ckptfmt db adopt` gives it a catalog identity of its own",
            site.backend.url,
            known,
        )
        return
    raise Conflict(
        f"{site.backend.url} is a copy of {known}, whose catalog is {sql.url}: writing through the copy would change "
        f"the original; give the copy a catalog of its own with `ckptfmt db adopt {site.backend.url}`",
        kind="copied_root",
    )


def _governs_elsewhere(site: Site, sql: Catalog, url: str, open_place: Callable[[str], Backend]) -> bool:
    """Whether this catalog governs another root at ``url``, too. One that cannot be seen was moved, not copied."""
    try:
        with closing(open_place(url)) as other:
            marker, claim = read_marker(other), governing_claim(other)
    except CkptError:
        return False
    if marker is None or marker.repository != site.repository or claim is None:
        return False
    return claim.catalog == sql.identity().uuid and not is_same_place(other.url, site.backend.url)


def is_same_place(one: str, other: str) -> bool:
    """Whether two URLs lead to one root, be it through links or mounts."""
    if one == other or not (one.startswith("file:") and other.startswith("file:")):
        return one == other
    try:
        return os.path.samefile(root_path(one), root_path(other))
    except FileNotFoundError:
        return False


def is_same_catalog_file(url: str, backend: Backend) -> bool:
    """Whether the embedded catalog of the root at ``url`` is the very file of ``backend``'s, through a link."""
    try:
        return url.startswith("file:") and os.path.samefile(root_path(url) / EMBEDDED_CATALOG, embedded_path(backend))
    except OSError:
        return False
