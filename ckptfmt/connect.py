"""The only room that names concrete backends, catalogs and array families: by URL scheme, and lazily."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ckptfmt.errors import CatalogError, Conflict, InvalidInput, NotFound
from ckptfmt.format import layout, verdict

if TYPE_CHECKING:
    from ckptfmt.engine.families import Families
    from ckptfmt.engine.site import Site
    from ckptfmt.ports.backend import Backend
    from ckptfmt.ports.catalog import Catalog
    from ckptfmt.ports.coordination import Board

Mode = Literal["r", "w"]
Framework = Literal["saved", "torch", "numpy"]

CATALOG_VARIABLE = "CKPTFMT_CATALOG"
NO_CATALOG = "none"


@dataclass
class Connection:
    """What a URL led to: a repository, or (``folder``) one generation's folder by itself."""

    url: str
    site: Site
    folder: bool = False
    closed: bool = False

    def close(self) -> None:
        """Close catalog and backend. Generations that are open already stay readable."""
        from ckptfmt.engine.transfer import DROPPED

        self.closed = True
        DROPPED.settle()  # what was read through a view still has its reader's row to remove
        with ExitStack() as ends:  # each of them, also where another one fails
            ends.callback(self.site.backend.close)
            ends.callback(self.site.tiers.close)
            if self.site.catalog is not None:
                ends.callback(self.site.catalog.close)


class _Closes(Protocol):
    def close(self) -> None: ...


@contextmanager
def closed_on_error(opened: _Closes) -> Iterator[None]:
    """Close ``opened`` if the block fails: nobody else will hear of it."""
    try:
        yield
    except BaseException:
        opened.close()
        raise


# -- backends ---------------------------------------------------------------------------------------
def backend_for(
    url: str | os.PathLike[str], options: Mapping[str, Any] | None = None, *, create: bool = False
) -> Backend:
    """Return the backend for ``url``. With ``create`` its root is made if absent.

    ``InvalidInput`` for an unknown scheme or an unknown storage option.
    """
    text = os.fspath(url)
    scheme, colon, rest = text.partition("://")
    if not colon:
        scheme, rest = "file", text
    if scheme == "file":
        return _posix(rest, options, create)
    if scheme == "memory":
        from ckptfmt.backends.memory import MemoryBackend

        _options(None, options, scheme)
        return MemoryBackend(rest)
    if scheme in ("s3", "gs", "az"):
        return _objects(text, scheme, options, create)
    return _fsspec(text, options, create)


def _posix(path: str, options: Mapping[str, Any] | None, create: bool) -> Backend:
    from ckptfmt.backends.posix import PosixBackend, PosixOptions

    if not path:
        raise InvalidInput("an empty path is no repository: give a folder")
    backend = PosixBackend(path, _options(PosixOptions, options, "file"))
    if create:
        with closed_on_error(backend):
            backend.create_root()
    return backend


def _objects(url: str, scheme: str, options: Mapping[str, Any] | None, create: bool) -> Backend:
    if scheme == "s3":
        from ckptfmt.backends.s3 import s3_backend as opened
    else:
        from ckptfmt.backends.obstore_store import obstore_backend as opened
    backend = opened(url, options)
    if create:
        with closed_on_error(backend):
            backend.create_root()
    return backend


def _fsspec(url: str, options: Mapping[str, Any] | None, create: bool) -> Backend:
    """Any other URL. What ``storage_options`` holds beyond our own names is for the file system to know."""
    from ckptfmt.backends import fsspec_opening
    from ckptfmt.backends.fsspec_backend import FsspecBackend, FsspecOptions

    scheme, shown = url.partition("://")[0], fsspec_opening.shown(url)
    if not fsspec_opening.is_known(scheme):
        raise InvalidInput(
            f"{shown}: no backend for the scheme {scheme!r}; give a path, file://..., or a URL that fsspec knows"
        )
    given = dict(options or {})
    ours = {name: given.pop(name) for name in FsspecOptions.__struct_fields__ if name in given}
    wanted = _options(FsspecOptions, ours, scheme)
    fs, root = fsspec_opening.open_file_system(url, given)
    backend = FsspecBackend(fs, root, shown, wanted)
    if create:
        with closed_on_error(backend):
            backend.create_root()
    return backend


def _options(kind: Any, given: Mapping[str, Any] | None, scheme: str) -> Any:
    import msgspec

    if kind is None:
        if given:
            raise InvalidInput(f"storage_options: {scheme}:// takes none, got {sorted(given)}")
        return None
    try:
        return msgspec.convert(dict(given or {}), kind)
    except msgspec.ValidationError as error:
        fields = ", ".join(field.name for field in msgspec.structs.fields(kind))
        raise InvalidInput(f"storage_options for {scheme}://: {error}; known are: {fields}") from error


# -- catalogs ---------------------------------------------------------------------------------------
def catalog_url(backend: Backend, claim: verdict.CatalogClaim | None, given: str | None, mode: Mode) -> str | None:
    """Which catalog to open: the argument, else the environment, else the embedded one. None = read by proof."""
    chosen = given if given is not None else os.environ.get(CATALOG_VARIABLE) or None
    if chosen == NO_CATALOG:
        if mode == "w":
            raise InvalidInput(f'{backend.url}: catalog="none" reads by proof; writing needs a catalog')
        return None
    if chosen is not None:
        return chosen
    if not backend.traits.local:
        if mode == "r":
            return None
        raise InvalidInput(
            f"{backend.url} is not on a local file system, so it has no embedded catalog; name one, with\n"
            "  ckptfmt.open(url, catalog='postgresql://user@host/database')\n"
            f"  export {CATALOG_VARIABLE}=postgresql://user@host/database\n"
            "or, for one host, a file: sqlite:////local/path/catalog.sqlite"
        )
    if claim is not None and claim.location == "external":
        if mode == "r":
            return None
        raise InvalidInput(
            f"{backend.url} is governed by an external catalog ({claim.catalog}, epoch {claim.epoch}): name it with "
            f'catalog=... or {CATALOG_VARIABLE}, or read what storage proves with mode="r"'
        )
    from ckptfmt.engine.roots import EMBEDDED_CATALOG, embedded_path

    if not embedded_path(backend).exists():
        if claim is not None:
            raise CatalogError(
                f"{backend.url}: its catalog {EMBEDDED_CATALOG} is gone (epoch {claim.epoch}); rebuild it from storage "
                f"with `ckptfmt db rebuild {backend.url}`, or put the file back, or read what storage proves with "
                'mode="r", catalog="none"',
                kind="catalog_missing",
            )
        if mode == "r":
            return None
    return embedded_url(backend)


def embedded_url(backend: Backend) -> str:
    from ckptfmt.catalog.location import sqlite_url
    from ckptfmt.engine.roots import embedded_path

    return sqlite_url(embedded_path(backend))


def _open_catalog(
    url: str, marker: verdict.Marker, backend: Backend, claim: verdict.CatalogClaim | None, mode: Mode
) -> Catalog:
    """Open the catalog; a root that some catalog governs already never gets a second one."""
    from ckptfmt.catalog.location import display
    from ckptfmt.catalog.open import open_catalog

    create = mode == "w" and claim is None
    try:
        return open_catalog(url, repository=marker.repository, display_url=backend.url, mode=mode, create=create)
    except NotFound as error:
        if claim is None:
            raise
        raise Conflict(
            f"{backend.url} is governed by catalog {claim.catalog} (epoch {claim.epoch}), and {display(url)} is not "
            f'that one: {error}; pass the catalog that governs it, or read what storage proves with mode="r", '
            'catalog="none". If that catalog is lost: `ckptfmt db rebuild`; if this root is a copy: `ckptfmt db adopt`',
            kind="catalog_stranger",
        ) from error


# -- repositories -----------------------------------------------------------------------------------
def open_site(
    url: str | os.PathLike[str], *, mode: Mode, catalog: str | None, storage_options: Mapping[str, Any] | None
) -> Connection:
    """Open a repository; ``"w"`` creates it if absent, ``"r"`` creates, migrates and recovers nothing."""
    if mode not in ("r", "w"):
        raise InvalidInput(f'mode={mode!r}: give "r" or "w"')
    backend = backend_for(url, storage_options, create=mode == "w")
    with closed_on_error(backend):
        return _connected(backend, mode, catalog)


def _connected(backend: Backend, mode: Mode, catalog: str | None) -> Connection:
    from ckptfmt.engine import marker as markers
    from ckptfmt.engine.site import Site

    marker = markers.read_marker(backend)
    if marker is None and mode == "r":
        if markers.is_generation_folder(backend):
            return Connection(backend.url, Site("", backend, None, read_only=True), folder=True)
        raise NotFound(
            f"{backend.url} is no ckptfmt repository (it has no {layout.MARKER}), nor a generation's folder (it has no "
            f"{layout.COMMIT}); check the path, or save into it first"
        )
    if mode == "w":
        from ckptfmt.engine.tier_marks import refuse_replica

        refuse_replica(backend)
    if marker is None:
        marker = markers.create_marker(backend)
    if mode == "r" and _needs_no_claim(backend, catalog):
        return Connection(backend.url, Site(marker.repository, backend, None, read_only=True))
    from ckptfmt.engine.governing import governing_claim

    claim = governing_claim(backend)
    markers.check_one_root(backend, marker.repository, claim)
    with _sql_library(backend):
        chosen = catalog_url(backend, claim, catalog, mode)
        if chosen is None:
            return Connection(backend.url, Site(marker.repository, backend, None, read_only=True))
        sql = _open_catalog(chosen, marker, backend, claim, mode)
    site = Site(marker.repository, backend, sql, read_only=mode == "r")
    with closed_on_error(sql):
        _check_governs(site, sql, claim, writing=mode == "w")
    return Connection(backend.url, site)


@contextmanager
def _sql_library(backend: Backend) -> Iterator[None]:
    """An inference host may have none."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise InvalidInput(
            f"{backend.url}: its catalog cannot be opened, {error.name} is not installed; install it, or read what "
            'storage proves with mode="r", catalog="none"'
        ) from error


def _needs_no_claim(backend: Backend, given: str | None) -> bool:
    """Whether a root is read by proof whatever catalog governs it, and looking costs round trips: an inference host
    lists commits only. Verdict and manifest tell the repository that they are of."""
    chosen = given if given is not None else os.environ.get(CATALOG_VARIABLE) or NO_CATALOG
    return chosen == NO_CATALOG and backend.traits.distant and not backend.traits.local


def is_embedded(backend: Backend, url: str) -> bool:
    """Whether the catalog at ``url``, as it is displayed, is the one that lies in the root itself."""
    return backend.traits.local and url == embedded_url(backend)


def _check_governs(site: Site, sql: Catalog, claim: verdict.CatalogClaim | None, *, writing: bool) -> None:
    """The catalog must be the one that governs this root, and know all that storage proves before it is written to."""
    from ckptfmt.catalog.location import is_postgres
    from ckptfmt.engine import contradictions, governing, moved_root, roots

    governing.check_governs(site, sql, claim)
    if not writing:
        return
    last, embedded = sql.root_url(), is_embedded(site.backend, sql.url)
    moved = last != site.backend.url
    if moved:
        roots.require_not_copied(site, sql, last, embedded=embedded, open_place=backend_for)
        if is_postgres(sql.url):  # its last place may be on a host from here unseen
            moved_root.require_latest(site, last)
    location: governing.Location = "embedded" if embedded else "external"
    governing.claim_missing(site, sql, claim, location=location)
    contradictions.require_none(site)
    if moved:
        sql.moved_to(site.backend.url)


# -- array families ---------------------------------------------------------------------------------
def live_families() -> Families:
    """The families of what this process has loaded: torch's only if somebody imported torch."""
    return _families(torch="torch" in sys.modules)


def families_for(framework: Framework, *, saved_torch: bool) -> Families:
    """The families that a load needs. ``saved_torch``: the state holds torch tensors or torch types."""
    if framework == "torch":
        if importlib.util.find_spec("torch") is None:
            raise InvalidInput(
                'framework="torch" but torch is not installed; install ckptfmt[torch], or load as "numpy"'
            )
        return _families(torch=True)
    if framework == "numpy":
        return _families(torch=False)
    if framework != "saved":
        raise InvalidInput(f'framework={framework!r}: give "saved", "torch" or "numpy"')
    return _families(torch="torch" in sys.modules or (saved_torch and importlib.util.find_spec("torch") is not None))


@functools.cache
def _families(*, torch: bool) -> Families:
    """One of each for the process: types are looked up once, and a device has one side stream for all copies."""
    from ckptfmt.engine.families import Families

    if not torch:
        return Families()
    from ckptfmt.torch.family import TorchFamily

    return Families([TorchFamily()])


# -- other ranks --------------------------------------------------------------------------------------
def store_board(prefix: str, *, world_size: int) -> Board | None:
    """A message board in the store of torch.distributed, where it is initialised with that world size."""
    if "torch.distributed" not in sys.modules:
        return None
    from ckptfmt.torch.store import default_board

    return default_board(prefix, world_size=world_size)
