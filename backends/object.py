"""Objects in a bucket of an object store. No folder is made or looked for, nothing is listed to learn what was written.

``create`` is one PUT under the condition that the key be free; a large object is a multipart upload. Each failure is
handled by what is known afterwards: a lost answer to a create is settled by reading back, one to a completion likewise.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from ckptfmt.backends.buffers import flat_bytes
from ckptfmt.backends.keys import checked_key, checked_prefix, is_catalog_file, is_component, is_temporary
from ckptfmt.backends.object_errors import Cause, Failure, translate, truncated
from ckptfmt.backends.object_publishing import Place, publish
from ckptfmt.backends.object_spool import SpoolWriter
from ckptfmt.backends.object_store import Meta, MultipartStore, Upload
from ckptfmt.backends.object_writer import ObjectWriter
from ckptfmt.errors import Conflict, FormatError, InvalidInput
from ckptfmt.ports.backend import Buffer, ObjectInfo, Traits

log = logging.getLogger("ckptfmt")

OBJECT_BYTES_MAX: Final = 5 << 40


class ObjectBackend:
    """A ``Backend`` on an object store. Constructing it sends nothing; ``create_root`` asks what the server does."""

    def __init__(self, place: Place, scheme: str, *, multipart: MultipartStore | None) -> None:
        self._place: Final = place
        self._multipart: Final = multipart
        self._traits: Final = Traits(
            scheme=scheme,
            durable="the object store acknowledged the object, and what it holds was compared with what was sent",
            survives_power_loss=True,
            local=False,
            alignment=1,
            folders=False,
            distant=True,
            write_bytes=0 if multipart is None else multipart.part_bytes,
        )

    @property
    def url(self) -> str:
        return self._place.url

    @property
    def storage_options(self) -> Mapping[str, Any]:
        return self._place.options

    @property
    def traits(self) -> Traits:
        return self._traits

    # -- folders -------------------------------------------------------------------------------
    def create_root(self) -> None:
        """Prove that this process may write here, and that the server never overwrites when told not to.

        ``InvalidInput`` (kind ``no_conditional_create``) where it does and ``single_writer`` is not set,
        ``NotFound`` without the bucket, ``AccessDenied`` without the right to write.
        """
        with _translated("write to", self._place.shown):
            self._place.require_conditions()

    def make_folder(self, prefix: str) -> None:
        checked_prefix(prefix)

    def has_folder(self, prefix: str) -> bool:
        checked_prefix(prefix)
        return True

    def remove_folder(self, prefix: str) -> None:
        checked_prefix(prefix)

    # -- writing -------------------------------------------------------------------------------
    def create(self, key: str, data: Buffer) -> None:
        where = self._place.where(checked_key(key))
        view = flat_bytes(data, f"create {where}")
        with _translated("create", where):
            self._place.require_conditions()
            publish(self._place, key, view)

    def open_writer(self, key: str, nbytes: int, *, write_bytes: int = 0) -> ObjectWriter | SpoolWriter:
        where = self._place.where(checked_key(key))
        if not 0 <= nbytes <= OBJECT_BYTES_MAX:
            raise InvalidInput(f"write {where}: {nbytes} is no size of an object; give 0 to {OBJECT_BYTES_MAX} bytes")
        with _translated("write", where):
            if self._place.is_taken(key):
                raise Conflict(f"write {where}: the name is taken; objects are never overwritten: choose another name")
        if self._multipart is None:
            return SpoolWriter(self._place, key, nbytes)
        return ObjectWriter(self._place, self._multipart, key, nbytes, write_bytes)

    def sync(self, key: str) -> None:
        """Nothing: a store shows only what it keeps."""
        checked_key(key)

    def delete(self, key: str) -> None:
        whole = self._place.whole(checked_key(key))
        with _translated("delete", self._place.where(key)):
            self._place.patience.insist(lambda: self._place.store.delete(whole))

    # -- leftovers -----------------------------------------------------------------------------
    def sweep_debris(
        self, prefix: str, *, dry_run: bool, deep: bool = True, only: Collection[str] | None = None
    ) -> list[ObjectInfo]:
        """Objects of probes, and multipart uploads older than ``upload_grace`` that nobody finished.

        An upload counts what its parts hold, under the key that it was to have.
        """
        start = self._start(prefix)
        with _translated("sweep", self._place.where(prefix)):
            objects: list[tuple[ObjectInfo, Meta | Upload]] = [
                (self._info(meta), meta)
                for meta in self._place.patience.insist(lambda: list(self._place.store.list(start)))
                if self._is_debris(meta.key, start, deep)
            ]
            uploads = [(self._upload_info(upload), upload) for upload in self._stale_uploads(start, deep)]
            found = [each for each in [*objects, *uploads] if only is None or each[0].key in only]
            if not dry_run:
                for _, leftover in found:
                    self._remove(leftover)
        return sorted((info for info, _ in found), key=lambda info: info.key)

    def _is_debris(self, whole: str, start: str, deep: bool) -> bool:
        *folders, name = whole.removeprefix(start).split("/")
        return is_temporary(name) and all(map(is_component, folders)) and (deep or not folders)

    def _stale_uploads(self, start: str, deep: bool) -> list[Upload]:
        store = self._multipart
        if store is None:
            return []
        try:
            found = self._place.patience.insist(lambda: list(store.uploads(start)))
        except Failure as failure:
            if failure.cause not in (Cause.DENIED, Cause.UNSUPPORTED, Cause.INVALID):
                raise
            log.warning(
                "%s: unfinished uploads cannot be listed (%s); let a rule of the bucket's lifecycle abort them",
                self._place.shown,
                failure.words,
            )
            return []
        return [
            upload
            for upload in found
            if upload.age >= self._place.upload_grace and (deep or "/" not in upload.key.removeprefix(start))
        ]

    def _upload_info(self, upload: Upload) -> ObjectInfo:
        store = self._multipart
        assert store is not None
        try:
            nbytes = self._place.patience.insist(lambda: store.upload_bytes(upload))
        except Failure as failure:
            if failure.cause not in (Cause.NO_UPLOAD, Cause.ABSENT, Cause.UNSUPPORTED, Cause.DENIED):
                raise
            nbytes = 0
        return ObjectInfo(upload.key.removeprefix(self._place.root), nbytes)

    def _remove(self, leftover: Meta | Upload) -> None:
        store = self._multipart
        if isinstance(leftover, Upload):
            assert store is not None
            self._place.patience.insist(lambda: store.abort(leftover.key, leftover.id))
        else:
            self._place.patience.insist(lambda: self._place.store.delete(leftover.key))

    # -- reading -------------------------------------------------------------------------------
    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        where = self._place.where(checked_key(key))
        view = flat_bytes(buffer, f"read {where} at offset {offset}")
        if offset < 0 or buffer.readonly:
            raise InvalidInput(f"read {where} at offset {offset}: give an offset of at least 0 and a writable buffer")
        whole, done = self._place.whole(key), 0
        with _translated("read", where, offset=offset):
            if not len(view):
                size = self.head(key).nbytes
                if size < offset:
                    raise truncated("read", where, offset, 0, size)
            try:
                while done < len(view):
                    at, rest = offset + done, view[done:]
                    done += self._place.patience.insist(lambda: self._place.store.get_into(whole, at, rest))  # noqa: B023
            except Failure as failure:
                if failure.cause is not Cause.RANGE:
                    raise
                raise truncated("read", where, offset, len(view), max(offset + done, failure.size or 0)) from failure

    def map_cached(self, key: str, offset: int, memory: memoryview) -> None:
        return None  # nothing of the object is in this host's memory

    def read(self, key: str, *, limit: int) -> bytes:
        where = self._place.where(checked_key(key))
        with _translated("read", where):
            data, size = self._place.patience.insist(lambda: self._place.store.get(self._place.whole(key), limit))
        if size > limit:
            raise FormatError(
                f"read {where}: {size} bytes, but at most {limit} are expected of such an object; "
                "it was not written by this library, or is damaged"
            )
        return data

    def head(self, key: str) -> ObjectInfo:
        whole = self._place.whole(checked_key(key))
        with _translated("look at", self._place.where(key)):
            return ObjectInfo(key, self._place.patience.insist(lambda: self._place.store.head(whole)).nbytes)

    def list_folders(self, prefix: str) -> list[str]:
        start = self._start(prefix)
        with _translated("list", self._place.where(prefix)):
            found = self._place.patience.insist(lambda: set(self._place.store.list_folders(start)))
        return sorted(filter(is_component, found))

    def list(self, prefix: str) -> list[ObjectInfo]:
        start = self._start(prefix)
        with _translated("list", self._place.where(prefix)):
            found = self._place.patience.insist(lambda: list(self._place.store.list(start)))
        infos = [self._info(meta) for meta in found]
        return sorted((info for info in infos if _is_object(info.key)), key=lambda info: info.key)

    def _start(self, prefix: str) -> str:
        checked_prefix(prefix)
        return self._place.whole(f"{prefix}/" if prefix else "")

    def _info(self, meta: Meta) -> ObjectInfo:
        return ObjectInfo(meta.key.removeprefix(self._place.root), meta.nbytes)

    # -- the place -----------------------------------------------------------------------------
    def space(self) -> int | None:
        return None

    def close(self) -> None:
        """Close idle connections. The backend stays usable."""
        self._place.store.close()


def _is_object(key: str) -> bool:
    return all(map(is_component, key.split("/"))) and not is_catalog_file(key)


@contextmanager
def _translated(operation: str, where: str, *, offset: int | None = None) -> Iterator[None]:
    """Let no ``Failure`` out of the block."""
    try:
        yield
    except Failure as failure:
        raise translate(failure, operation, where, offset=offset) from failure
