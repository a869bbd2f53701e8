"""From a connection to generations: found, opened, and guarded by a reader's row while their bytes are read."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from ckptfmt import connect
from ckptfmt.engine import process
from ckptfmt.engine.load.resolve import Wanted, open_folder, open_wanted
from ckptfmt.engine.opened import Opened, open_row
from ckptfmt.errors import CatalogError
from ckptfmt.generation import Generation
from ckptfmt.ports.catalog import UNWRITABLE
from ckptfmt.reference import At, parse_at

if TYPE_CHECKING:
    from ckptfmt.ports.catalog import Catalog
    from ckptfmt.ports.records import GenerationRecord

log = logging.getLogger("ckptfmt")

_READER_SECONDS = 3600.0


def find(connection: connect.Connection, run: str | None, at: At) -> Generation:
    """The generation that ``run`` and ``at`` name (None: the only run, the latest committed generation)."""
    return wrap(connection, find_opened(connection, run, at))


def find_opened(connection: connect.Connection, run: str | None, at: At) -> Opened:
    """As ``find``, for rooms that read it in ways of their own."""
    if connection.folder:
        return open_folder(connection.site)
    wanted = parse_at(at)
    return open_wanted(connection.site, run, Wanted(wanted.id, wanted.step, wanted.tag))


def open_record(connection: connect.Connection, row: GenerationRecord) -> Generation:
    """Open the generation of a catalog row."""
    return wrap(connection, open_row(connection.site, row))


def open_unguarded(connection: connect.Connection, row: GenerationRecord) -> Generation:
    """As ``open_record``, where another rank is the registered reader for all of them: asks nothing of the catalog."""
    return Generation(
        open_row(connection.site, row),
        families_for=connect.families_for,
        live_families=connect.live_families,
        guard=_unguarded,
    )


@contextmanager
def _unguarded(opened: Opened) -> Iterator[None]:
    yield


def wrap(connection: connect.Connection, opened: Opened) -> Generation:
    return Generation(
        opened,
        families_for=connect.families_for,
        live_families=connect.live_families,
        guard=_Guard(connection),
    )


def guarded(connection: connect.Connection, opened: Opened) -> AbstractContextManager[None]:
    """Registered as a reader of ``opened``, as whoever loads it."""
    return _Guard(connection)(opened)


class _Guard:
    """Keeps a registered reader while bytes are read, so that the generation is not retired underneath.

    Where the catalog can't be written to, reading goes on without: nothing is more urgent than a restore. This is told
    once.
    """

    def __init__(self, connection: connect.Connection) -> None:
        self._connection = connection
        self._told = False

    @contextmanager
    def __call__(self, opened: Opened) -> Iterator[None]:
        catalog = self._connection.site.catalog
        if catalog is None or self._connection.site.read_only or self._connection.closed:
            yield  # no row can be written: the grace between retirement and deletion protects this reader
            return
        reader, pid = self._register(catalog, opened), os.getpid()
        try:
            yield
        finally:
            if reader is not None and pid == os.getpid():  # a forked child leaves its parent's row alone
                _forget(catalog, opened, reader)

    def _register(self, catalog: Catalog, opened: Opened) -> int | None:
        try:
            return catalog.open_reader(
                opened.info.id, host=process.host_name(), pid=os.getpid(), ttl_seconds=_READER_SECONDS
            )
        except CatalogError as error:
            if error.kind not in UNWRITABLE:
                raise
            if not self._told:
                self._told = True
                log.warning(
                    "%s is read without being registered as its reader: should it be retired meanwhile, only the grace "
                    "between retirement and deletion keeps its bytes: %s",
                    opened.name,
                    error,
                )
            return None


def _forget(catalog: Catalog, opened: Opened, reader: int) -> None:
    """What was read has been read, whatever becomes of the row."""
    try:
        catalog.close_reader(reader)
    except CatalogError as error:
        log.warning(
            "%s stays registered as being read by this process for up to %d minutes: %s",
            opened.name,
            _READER_SECONDS / 60,
            error,
        )
