"""The only room that names concrete backends, catalogs and array families: by URL scheme, and lazily."""

from __future__ import annotations

import importlib.util
import os
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

from ckptfmt.errors import CatalogError, Conflict, InvalidInput, NotFound
from ckptfmt.format import layout, verdict

if TYPE_CHECKING:
    from ckptfmt.engine.families import Families
    from ckptfmt.engine.site import Site
    from ckptfmt.ports.backend import Backend
    from ckptfmt.ports.catalog import Catalog

Mode = Literal["r", "w"]
Framework = Literal["saved", "torch", "numpy"]

CATALOG_VARIABLE = "CKPTFMT_CATALOG"
NO_CATALOG = "none"
EMBEDDED_CATALOG = "catalog.sqlite"


@dataclass
class Connection:
    """What a URL led to: a repository, or (``folder``) one generation's folder by itself."""

    url: str
    site: Site
    folder: bool = False
    closed: bool = False

    def close(self) -> None:
        """Close catalog and backend. Generations that are open already stay readable."""
        self.closed = True
        if self.site.catalog is not None:
            self.site.catalog.close()
        self.site.backend.close()


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
    raise InvalidInput(
        f"{text}: no backend for the scheme {scheme!r}; this version stores in local folders (a path or file://...)"
    )


def _posix(path: str, options: Mapping[str, Any] | None, create: bool) -> Backend:
    from ckptfmt.backends.posix import PosixBackend, PosixOptions

    if not path:
        raise InvalidInput("an empty path is no repository: give a folder")
    backend = PosixBackend(path, _options(PosixOptions, options, "file"))
    if create:
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
            "  ckptfmt.open(url, catalog='sqlite:////local/path/catalog.sqlite')   # one host\n"
            f"  export {CATALOG_VARIABLE}=sqlite:////local/path/catalog.sqlite"
        )
    if claim is not None and claim.location == "external":
        if mode == "r":
            return None
        raise InvalidInput(
            f"{backend.url} is governed by an external catalog ({claim.catalog}, epoch {claim.epoch}): name it with "
            f'catalog=... or {CATALOG_VARIABLE}, or read what storage proves with mode="r"'
        )
    if not embedded_path(backend).exists():
        if claim is not None:
            raise CatalogError(
                f"{backend.url}: its catalog {EMBEDDED_CATALOG} is gone (epoch {claim.epoch}); put the file back, or "
                'read what storage proves with mode="r", catalog="none"',
                kind="catalog_missing",
            )
        if mode == "r":
            return None
    return embedded_url(backend)


def embedded_url(backend: Backend) -> str:
    from ckptfmt.catalog.location import sqlite_url

    return sqlite_url(embedded_path(backend))


def embedded_path(backend: Backend) -> Any:
    from pathlib import Path
    from urllib.parse import unquote, urlsplit

    return Path(unquote(urlsplit(backend.url).path)) / EMBEDDED_CATALOG


def governing_claim(backend: Backend) -> verdict.CatalogClaim | None:
    """The claim of the highest epoch: which catalog governs this root."""
    epochs = [
        (epoch, info.key)
        for info in backend.list(layout.CATALOGS)
        if (epoch := layout.parse_catalog_claim(info.key.rpartition("/")[2])) is not None
    ]
    if not epochs:
        return None
    from ckptfmt.engine.verdicts import decode_at

    key = max(epochs)[1]
    return decode_at(backend, key, backend.read(key, limit=verdict.BYTES_MAX), verdict.decode_claim)


def _open_catalog(
    url: str, marker: verdict.Marker, backend: Backend, claim: verdict.CatalogClaim | None, mode: Mode
) -> Catalog:
    """Open the catalog; a root that some catalog governs already never gets a second one."""
    scheme = url.partition(":")[0].partition("+")[0]
    if scheme != "sqlite":
        raise InvalidInput(
            f"catalog {scheme}://...: this version keeps its catalog in SQLite (sqlite:////path/catalog.sqlite)"
        )
    from ckptfmt.catalog.open import open_catalog

    create = mode == "w" and claim is None
    try:
        return open_catalog(url, repository=marker.repository, display_url=backend.url, mode=mode, create=create)
    except NotFound as error:
        if claim is None:
            raise
        raise Conflict(
            f"{backend.url} is governed by catalog {claim.catalog} (epoch {claim.epoch}), and {url} is not that one: "
            f'{error}; pass the catalog that governs it, or read what storage proves with mode="r", catalog="none"'
        ) from error


# -- repositories -----------------------------------------------------------------------------------
def open_site(
    url: str | os.PathLike[str], *, mode: Mode, catalog: str | None, storage_options: Mapping[str, Any] | None
) -> Connection:
    """Open a repository; ``"w"`` creates it if absent, ``"r"`` creates, migrates and recovers nothing."""
    from ckptfmt.engine.site import Site

    if mode not in ("r", "w"):
        raise InvalidInput(f'mode={mode!r}: give "r" or "w"')
    backend = backend_for(url, storage_options, create=mode == "w")
    marker = read_marker(backend)
    if marker is None and mode == "r":
        if _is_generation_folder(backend):
            return Connection(backend.url, Site("", backend, None, read_only=True), folder=True)
        raise NotFound(
            f"{backend.url} is no ckptfmt repository (it has no {layout.MARKER}); check the path, or save into it first"
        )
    if marker is None:
        marker = _create_marker(backend)
    claim = governing_claim(backend)
    chosen = catalog_url(backend, claim, catalog, mode)
    if chosen is None:
        return Connection(backend.url, Site(marker.repository, backend, None, read_only=True))
    sql = _open_catalog(chosen, marker, backend, claim, mode)
    try:
        _check_claim(backend, sql, marker.repository, claim, mode)
    except BaseException:
        sql.close()
        raise
    return Connection(backend.url, Site(marker.repository, backend, sql, read_only=mode == "r"))


def read_marker(backend: Backend) -> verdict.Marker | None:
    from ckptfmt.engine.verdicts import decode_at

    try:
        data = backend.read(layout.MARKER, limit=verdict.BYTES_MAX)
    except NotFound:
        return None
    return decode_at(backend, layout.MARKER, data, verdict.decode_marker)


def _is_generation_folder(backend: Backend) -> bool:
    try:
        backend.head(layout.COMMIT)
    except NotFound:
        return False
    return True


def _create_marker(backend: Backend) -> verdict.Marker:
    if _is_generation_folder(backend):
        raise InvalidInput(f"{backend.url} is a generation's folder: open its repository to write")
    new = verdict.Marker(repository=str(uuid.uuid4()), created_at=verdict.timestamp(datetime.now(UTC)))
    try:
        backend.create(layout.MARKER, verdict.encode_marker(new))
    except Conflict:  # another process made it a moment ago
        found = read_marker(backend)
        if found is None:
            raise
        return found
    return new


def _check_claim(
    backend: Backend, sql: Catalog, repository: str, claim: verdict.CatalogClaim | None, mode: Mode
) -> None:
    """The catalog must be the one that governs this root, else its rows say nothing about these bytes."""
    identity = sql.identity()
    if claim is None:
        if mode == "r":
            return
        embedded = backend.traits.local and sql.url == embedded_url(backend)
        new = verdict.CatalogClaim(
            repository=repository,
            catalog=identity.uuid,
            epoch=identity.epoch,
            location="embedded" if embedded else "external",
        )
        backend.make_folder(layout.CATALOGS)
        backend.create(layout.catalog_claim(identity.epoch), verdict.encode_claim(new))
        claim = governing_claim(backend) or new
    if claim.repository != repository:
        raise Conflict(
            f"{backend.url}: {layout.catalog_claim(claim.epoch)} belongs to repository {claim.repository}, the marker "
            f"says {repository}: two roots were mixed; restore the folder {layout.CATALOGS} from a copy"
        )
    if (claim.catalog, claim.epoch) != (identity.uuid, identity.epoch):
        raise Conflict(
            f"{backend.url} is governed by catalog {claim.catalog} (epoch {claim.epoch}), but {sql.url} is catalog "
            f"{identity.uuid} (epoch {identity.epoch}); pass the catalog that governs it, or read what storage proves "
            'with mode="r", catalog="none"'
        )


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


def _families(*, torch: bool) -> Families:
    from ckptfmt.engine.families import Families

    if not torch:
        return Families()
    from ckptfmt.torch.family import TorchFamily

    return Families([TorchFamily()])
