"""From the URL of a command line to an open repository or generation folder."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ckptfmt import connect
from ckptfmt.cli.options import storage_options
from ckptfmt.errors import InvalidInput, NotFound
from ckptfmt.reference import Reference, parse_at, parse_reference

if TYPE_CHECKING:
    from ckptfmt.cli.known_tiers import Unreachable
    from ckptfmt.engine.opened import Opened
    from ckptfmt.engine.site import Site
    from ckptfmt.ports.catalog import Catalog


@dataclass(frozen=True)
class Place:
    """What a URL led to, and the run and generation that it names."""

    connection: connect.Connection
    reference: Reference
    unreachable: tuple[Unreachable, ...] = ()
    """Tiers that the catalog knows and that cannot be opened."""

    @property
    def site(self) -> Site:
        return self.connection.site

    @property
    def url(self) -> str:
        return self.connection.url

    @property
    def read_by(self) -> str:
        """``catalog``, or ``proof`` where there is none."""
        return "proof" if self.site.catalog is None else "catalog"

    def now(self) -> datetime:
        """The clock by which ages are told: the catalog's own, where there is one."""
        return datetime.now(UTC) if self.site.catalog is None else self.site.catalog.database_now()

    def require_repository(self) -> None:
        if self.connection.folder:
            raise InvalidInput(f"{self.url} is the folder of one generation, no repository; see `ckptfmt inspect`")

    def require_catalog(self, verb: str) -> Catalog:
        """The catalog of a repository, for a verb that does nothing without: ``InvalidInput``."""
        self.require_repository()
        if self.site.catalog is None:
            raise InvalidInput(
                f"{self.url} is read by proof, without a catalog; {verb} needs the one that governs it: --catalog URL"
            )
        return self.site.catalog

    def require_run(self, run: str, among: Sequence[str]) -> None:
        """``NotFound``, with the runs that there are, unless ``run`` is one of them."""
        if run not in among:
            raise NotFound(f"{self.url} has no run {run!r}; it has {', '.join(map(repr, among[:20])) or 'none'}")

    def open(self) -> Opened:
        """The committed generation that the URL names; ``NotFound`` and ``NotCommitted`` say what there is."""
        from ckptfmt.engine.load.resolve import Wanted, open_folder, open_wanted

        if self.connection.folder:
            if self.reference.run is not None:
                raise InvalidInput(f"{self.url} is the folder of one generation: leave out #{self.reference.run}")
            opened = open_folder(self.site)
        else:
            wanted = parse_at(self.reference.at)
            opened = open_wanted(self.site, self.reference.run, Wanted(wanted.id, wanted.step, wanted.tag))
        opened.require_packs()
        return opened


@contextmanager
def opened_place(arguments: Namespace, *, url: str | None = None, mode: connect.Mode = "r") -> Iterator[Place]:
    """Open what the command line names, or ``url``.

    Unlike in the library, mode "w" creates nothing: a typing error makes no repository.
    """
    reference = parse_reference(arguments.url if url is None else url)
    options = storage_options(arguments.storage_option)
    if mode == "w":
        _require_catalog(reference.url, arguments.catalog, options)
    connection = connect.open_site(reference.url, mode=mode, catalog=arguments.catalog, storage_options=options)
    unreachable: tuple[Unreachable, ...] = ()
    if hasattr(arguments, "replica") and not connection.folder:
        from ckptfmt.cli.known_tiers import with_known_tiers

        connection, unreachable = with_known_tiers(connection, arguments.stage, arguments.replica)
    try:
        yield Place(connection, reference, unreachable)
    finally:
        connection.close()


def _require_catalog(url: str, catalog: str | None, options: dict[str, object] | None) -> None:
    """``NotFound`` or ``InvalidInput`` where opening for writing would create a repository or a catalog."""
    from ckptfmt.engine.governing import governing_claim
    from ckptfmt.engine.marker import require_marker

    backend = connect.backend_for(url, options)
    try:
        require_marker(backend)
        if connect.catalog_url(backend, governing_claim(backend), catalog, "r") is None:
            raise InvalidInput(
                f"{backend.url} is not opened with a catalog; name the one that governs it: --catalog URL"
            )
    finally:
        backend.close()
