"""The ``ObjectStore`` of Google Cloud Storage and Azure, through obstore: requests, signatures and keys are its own.

It neither sends parts of an upload out of order nor publishes one under a condition, so large objects pass through a
file (``object_spool``). It retries nothing: what may be repeated is known here, not there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import quote, unquote, urlsplit

import msgspec

from ckptfmt.backends.discreet_options import DiscreetOptions, chosen
from ckptfmt.backends.endpoints import checked_endpoint
from ckptfmt.backends.fork_locks import ForkLock
from ckptfmt.backends.object import ObjectBackend
from ckptfmt.backends.object_errors import Cause, Failure, from_obstore
from ckptfmt.backends.object_publishing import Place
from ckptfmt.backends.object_retry import Patience
from ckptfmt.backends.object_store import Meta
from ckptfmt.errors import InvalidInput

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_CHUNK: Final = 16 << 20
_STREAMS: Final = 4

NO_RETRIES: Final[dict[str, Any]] = {"max_retries": 0, "retry_timeout": timedelta(0)}


class CommonOptions(DiscreetOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What ``gs://`` and ``az://`` share."""

    anon: bool = False
    """Requests are not signed: public buckets."""
    endpoint: str | None = None
    allow_http: bool = False
    timeout: float = 60.0
    """Seconds of silence after which a request is given up."""
    connect_timeout: float = 10.0
    retry_attempts: int = 10
    retry_seconds: float = 120.0
    single_writer: bool = False


class GcsOptions(CommonOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``storage_options`` of a ``gs://`` repository. Without keys: the environment, or the machine's account."""

    service_account: str | None = None
    """A file with the keys of a service account."""
    token: str | None = None
    """A bearer token, or the file of the application's default keys."""


class AzureOptions(CommonOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``storage_options`` of an ``az://`` repository. Without keys: the environment, or the machine's identity."""

    account_name: str | None = None
    account_key: str | None = None
    sas_token: str | None = None
    client_id: str | None = None
    client_secret: str | None = None
    tenant_id: str | None = None


class ObstoreStore:
    """A bucket behind obstore. ``make`` gives its client, of which each process has its own."""

    def __init__(self, make: Callable[[], ObjectStore]) -> None:
        self._make: Final = make
        self._lock: Final = ForkLock()
        self._clients: dict[int, ObjectStore] = {}

    @property
    def _client(self) -> ObjectStore:
        with self._lock:
            pid = os.getpid()
            if pid not in self._clients:  # a fork: obstore's threads stayed with the parent
                self._clients = {pid: self._make()}
            return self._clients[pid]

    def put(self, key: str, data: memoryview, *, absent: bool, crc: int | None = None) -> str | None:
        import obstore

        with _told():
            mode: Literal["create", "overwrite"] = "create" if absent else "overwrite"
            return obstore.put(self._client, key, bytes(data), mode=mode, use_multipart=False)["e_tag"]

    def put_file(self, key: str, descriptor: int, nbytes: int) -> str | None:
        import obstore

        def pieces() -> Iterator[bytes]:
            for at in range(0, nbytes, _CHUNK):
                yield os.pread(descriptor, _CHUNK, at)

        with _told():
            return obstore.put(
                self._client, key, pieces(), use_multipart=True, chunk_size=_CHUNK, max_concurrency=_STREAMS
            )["e_tag"]

    def get(self, key: str, limit: int) -> tuple[bytes, int]:
        import obstore

        with _told():
            found = obstore.get(self._client, key)
            size = int(found.meta["size"])
            return (bytes(found.bytes()), size) if size <= limit else (b"", size)

    def get_into(self, key: str, offset: int, view: memoryview) -> int:
        import obstore

        with _told():
            found = memoryview(obstore.get_range(self._client, key, start=offset, length=len(view)))
        if not 0 < len(found) <= len(view):
            raise Failure(Cause.OTHER, f"{len(found)} bytes came of {len(view)} that were asked for")
        view[: len(found)] = found
        return len(found)

    def head(self, key: str) -> Meta:
        import obstore

        with _told():
            found = obstore.head(self._client, key)
        return Meta(key, int(found["size"]), etag=found["e_tag"])

    def delete(self, key: str) -> None:
        import obstore

        try:
            with _told():
                obstore.delete(self._client, key)
        except Failure as failure:
            if failure.cause is not Cause.ABSENT:
                raise

    def list(self, prefix: str) -> Iterator[Meta]:
        import obstore

        with _told():
            for page in obstore.list(self._client, prefix.rstrip("/") or None, chunk_size=1000):
                for entry in page:
                    if entry["path"].startswith(prefix):
                        yield Meta(entry["path"], int(entry["size"]))

    def list_folders(self, prefix: str) -> Iterator[str]:
        import obstore

        with _told():
            found = obstore.list_with_delimiter(self._client, prefix.rstrip("/") or None)
        for name in found["common_prefixes"]:
            yield name.rstrip("/")[len(prefix) :]

    def close(self) -> None:
        with self._lock:
            self._clients.clear()


@contextmanager
def _told() -> Iterator[None]:
    """obstore's errors have no base of their own beside builtins."""
    try:
        yield
    except (Failure, MemoryError):
        raise
    except Exception as error:
        raise from_obstore(error) from error


def obstore_backend(url: str, given: Mapping[str, Any] | None = None) -> ObjectBackend:
    """Return the backend of a ``gs://bucket/prefix`` or ``az://container/prefix`` URL. Nothing is sent yet."""
    parts = urlsplit(url)
    scheme = parts.scheme
    if parts.query or parts.fragment or "@" in parts.netloc or not parts.netloc:
        raise InvalidInput(f"{scheme}://: give {scheme}://bucket/prefix, and everything else in storage_options")
    options, make = _client_of(scheme, parts.netloc, given)
    prefix = "/".join(filter(None, unquote(parts.path).split("/")))
    shown = f"{scheme}://" + quote(f"{parts.netloc}/{prefix}" if prefix else parts.netloc)
    place = Place(
        store=ObstoreStore(make),
        url=shown,
        shown=shown,
        root=f"{prefix}/" if prefix else "",
        patience=Patience(options.retry_attempts, options.retry_seconds),
        single_writer=options.single_writer,
        upload_grace=0.0,
        options=chosen(options),
    )
    return ObjectBackend(place, scheme, multipart=None)


def _client_of(
    scheme: str, bucket: str, given: Mapping[str, Any] | None
) -> tuple[CommonOptions, Callable[[], ObjectStore]]:
    try:
        from obstore.store import AzureStore, GCSStore
    except ModuleNotFoundError as error:
        extra = "gcs" if scheme == "gs" else "azure"
        raise InvalidInput(f"{scheme}:// needs obstore: pip install 'ckptfmt[{extra}]'") from error
    if scheme == "gs":
        gcs = _converted(GcsOptions, scheme, given)
        names: dict[str, Any] = {"service_account": gcs.service_account, "skip_signature": gcs.anon or None}
        names["base_url"] = gcs.endpoint
        if gcs.token is not None:
            names["application_credentials" if os.path.exists(gcs.token) else "bearer_token"] = gcs.token
        return gcs, lambda: GCSStore(bucket, **_common(gcs), **_given(names))
    azure = _converted(AzureOptions, scheme, given)
    names = {
        "account_name": azure.account_name,
        "account_key": azure.account_key,
        "sas_key": azure.sas_token,
        "client_id": azure.client_id,
        "client_secret": azure.client_secret,
        "tenant_id": azure.tenant_id,
        "endpoint": azure.endpoint,
        "skip_signature": azure.anon or None,
    }
    return azure, lambda: AzureStore(bucket, **_common(azure), **_given(names))


def _given(names: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in names.items() if value is not None}


def _common(options: CommonOptions) -> dict[str, Any]:
    client = {
        "allow_http": options.allow_http,
        "connect_timeout": timedelta(seconds=options.connect_timeout),
        "read_timeout": timedelta(seconds=options.timeout),
        "timeout": timedelta(days=1),  # of a whole request: a large one takes its time
    }
    return {"client_options": client, "retry_config": NO_RETRIES}


def _converted(kind: Any, scheme: str, given: Mapping[str, Any] | None) -> Any:
    fields = [field.name for field in msgspec.structs.fields(kind)]
    if unknown := sorted(set(given or {}) - set(fields)):
        raise InvalidInput(
            f"storage_options for {scheme}://: unknown {', '.join(unknown)}; known are: {', '.join(fields)}"
        )
    try:
        options = msgspec.convert(dict(given or {}), kind)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"storage_options for {scheme}://: {error}; known are: {', '.join(fields)}") from None
    if options.endpoint is not None:
        checked_endpoint(options.endpoint)
    Patience(options.retry_attempts, options.retry_seconds)
    return options
