"""Objects on any file system of fsspec: ``sftp://``, ``hf://``, ``http://`` (to read), ``fsspec+s3://``, ...

fsspec promises little that a checkpoint needs, so nothing is taken on trust: what a file system can do is known by its
class or tried out, listings are never remembered, and where a commit record could be overwritten by another launch
nothing is written unless the user vouches for being the only one.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any, Final

import msgspec

from ckptfmt.backends.buffers import flat_bytes
from ckptfmt.backends.discreet_options import chosen
from ckptfmt.backends.fsspec_choosing import choose
from ckptfmt.backends.fsspec_errors import Taken
from ckptfmt.backends.fsspec_place import Place
from ckptfmt.backends.fsspec_publish import Content, InMemory, Publisher, is_equal
from ckptfmt.backends.fsspec_writer import SpoolWriter
from ckptfmt.backends.keys import checked_key, checked_prefix, is_catalog_file, is_component, is_temporary
from ckptfmt.errors import BackendError, CkptError, Conflict, Corrupt, FormatError, InvalidInput, NotFound
from ckptfmt.ports.backend import Buffer, ObjectInfo, Traits


class FsspecOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What ckptfmt itself takes from ``storage_options``; all others go to the file system."""

    single_writer: bool = False
    """The user vouches that no two launches ever write here at the same time. Needed where the file system cannot
    refuse a taken name."""
    spool: str | None = None
    """Folder on a local disk in which an object waits until it is whole. None: the system's folder for such files."""
    read_back: bool = True
    """Compare every object with what the place returns after it was written."""


class FsspecBackend:
    """A ``Backend`` on ``root`` of a file system. ``url`` is what is told and stored: it holds no password."""

    def __init__(self, fs: Any, root: str, url: str, options: FsspecOptions | None = None) -> None:
        self._place: Final = Place(fs, root, url)
        self._options: Final = options or FsspecOptions()
        self._spool: Final = self._options.spool or tempfile.gettempdir()
        self._choosing: Final = threading.Lock()
        self._publisher: Publisher | None = None
        self._listing_proven = not self._place.kind.in_html

    @property
    def url(self) -> str:
        return self._place.url

    @property
    def storage_options(self) -> Mapping[str, Any]:
        """Ours alone: which of the file system's own are secrets is not known."""
        return chosen(self._options)

    @property
    def traits(self) -> Traits:
        kind = self._place.kind
        return Traits(
            scheme=self.url.partition("://")[0],
            durable=kind.durable,
            survives_power_loss=kind.survives_power_loss,
            local=False,
            alignment=1,
            folders=kind.folders,
            distant=kind.distant,
        )

    # -- how objects are published ---------------------------------------------------------------
    def create_root(self) -> None:
        """Make the root if it is absent, and find out whether this place may be written to.

        ``InvalidInput`` where it cannot be done safely, with what would be needed.
        """
        self._publishing()

    def _publishing(self) -> Publisher:
        with self._choosing:
            if self._publisher is None:
                if self._place.kind.folders and self._place.kind.writable:
                    self.make_folder("")
                self._publisher = choose(self._place, single_writer=self._options.single_writer)
            return self._publisher

    # -- folders -----------------------------------------------------------------------------------
    def make_folder(self, prefix: str) -> None:
        checked_prefix(prefix)
        if not self._place.kind.folders:
            return
        depth = prefix.count("/") + 1
        failure: CkptError | None = None
        for _ in range(depth + 1):  # others may be making the same folders, and some libraries trip over that
            try:
                self._place.make_folders(prefix)
            except CkptError as error:
                failure = error
            if self.has_folder(prefix):
                return
            self._require_no_object_above(prefix)
        raise failure or BackendError(f"make folder {self._where(prefix)}: it was made, but is not there")

    def _require_no_object_above(self, prefix: str) -> None:
        names = prefix.split("/") if prefix else []
        for depth in range(len(names) + 1):
            key = "/".join(names[:depth])
            found = self._place.look(key, "make folder")
            if found is not None and found.kind != "folder":
                raise Conflict(f"make folder {self._where(key)}: an object stands in its place; move it away")

    def remove_folder(self, prefix: str) -> None:
        """Nothing: file systems differ in whether they remove what is not empty."""
        checked_prefix(prefix)

    def has_folder(self, prefix: str) -> bool:
        checked_prefix(prefix)
        if not self._place.kind.folders:
            return True
        found = self._place.look(prefix, "look for folder")
        return found is not None and found.kind == "folder"

    def _require_folder(self, key: str, operation: str) -> None:
        folder = key.rpartition("/")[0]
        if not self.has_folder(folder):
            raise NotFound(f"{operation} {self._where(key)}: the folder {folder!r} is absent; make it first")

    # -- writing -----------------------------------------------------------------------------------
    def create(self, key: str, data: Buffer) -> None:
        where = self._where(checked_key(key))
        content = InMemory(bytes(flat_bytes(data, f"create {where}")))
        self._require_folder(key, "create")
        self._publish(key, content)

    def open_writer(self, key: str, nbytes: int, *, write_bytes: int = 0) -> SpoolWriter:
        where = self._where(checked_key(key))
        self._publishing()  # a place that is only read from is told before anything is spooled
        writer = SpoolWriter(where, nbytes, self._spool, partial(self._publish, key))
        try:
            self._require_folder(key, "write")
            if self._place.look(key, "write") is not None:
                raise self._taken(key)
        except BaseException:
            writer.abort()
            raise
        return writer

    def _publish(self, key: str, content: Content) -> None:
        try:
            self._publishing().publish(self._place, key, content, read_back=self._options.read_back)
        except Taken:
            # It may be our own: libraries repeat a request whose answer was lost.
            found = self._place.look(key, "compare")
            if found is None or found.kind != "file" or not is_equal(self._place, key, content):
                raise self._taken(key) from None

    def _taken(self, key: str) -> Conflict:
        return Conflict(
            f"write {self._where(key)}: the name is taken; objects are never overwritten: choose another name"
        )

    def sync(self, key: str) -> None:
        """Nothing: an object is published once it is durable, as far as that can be had."""
        checked_key(key)

    def delete(self, key: str) -> None:
        self._place.remove(checked_key(key))

    def sweep_debris(
        self, prefix: str, *, dry_run: bool, deep: bool = True, only: Collection[str] | None = None
    ) -> list[ObjectInfo]:
        walked = self._walk(checked_prefix(prefix), temporary=True, deep=deep)
        found = sorted((info for info in walked if only is None or info.key in only), key=lambda info: info.key)
        if not dry_run:
            for info in found:
                self._place.remove(info.key)
        return found

    # -- reading -----------------------------------------------------------------------------------
    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        where = self._where(checked_key(key))
        view = flat_bytes(buffer, f"read {where} at offset {offset}")
        if offset < 0 or buffer.readonly:
            raise InvalidInput(f"read {where} at offset {offset}: give an offset of at least 0 and a writable buffer")
        if len(view):
            found = self._place.read_into(key, offset, view)
        else:
            found = min(0, self._place.require_file(key, "read") - offset)
        if found != len(view):
            raise Corrupt(
                f"read {where} at offset {offset}: expected {len(view)} bytes, found {max(0, found)}; the object is "
                "truncated: verify the generation, and restore an older one or another copy",
                kind="truncated",
            )

    def map_cached(self, key: str, offset: int, memory: memoryview) -> None:
        checked_key(key)
        return None

    def read(self, key: str, *, limit: int) -> bytes:
        where = self._where(checked_key(key))
        nbytes = self._place.require_file(key, "read")
        if nbytes > limit:
            raise FormatError(
                f"read {where}: {nbytes} bytes, but at most {limit} are expected of such an object; "
                "it was not written by this library, or is damaged"
            )
        data = bytearray(nbytes)
        self.read_into(key, 0, memoryview(data))
        return bytes(data)

    def head(self, key: str) -> ObjectInfo:
        return ObjectInfo(checked_key(key), self._place.require_file(key, "look at"))

    # -- listing -----------------------------------------------------------------------------------
    def list_folders(self, prefix: str) -> list[str]:
        checked_prefix(prefix)
        self._require_listing()
        entries = self._place.entries(prefix)
        return sorted(entry.name for entry in entries if entry.kind == "folder" and is_component(entry.name))

    def _require_listing(self) -> None:
        """An empty page says nothing where a server may have no listings at all: then its root shows nothing either."""
        if self._listing_proven:
            return
        if not any(is_component(entry.name) for entry in self._place.entries("")):
            raise BackendError(
                f"list {self.url}: this server shows no listing of its folders; name a generation's folder itself, "
                f"{self.url}/runs/<run>/<generation>, which needs none, or serve the repository with an index",
                kind="no_listing",
            )
        self._listing_proven = True

    def _walk(self, prefix: str, *, temporary: bool, deep: bool) -> Iterator[ObjectInfo]:
        """Yield the objects (or, with ``temporary``, the leftovers of creates) below ``prefix``, unordered."""
        if self._place.kind.flat:
            below = self._place.everything(prefix)
            yield from (
                ObjectInfo(_joined(prefix, rest), nbytes)
                for rest, nbytes in below.items()
                if _is_object(prefix, rest, temporary=temporary) and (deep or "/" not in rest)
            )
            return
        pending, untold = [prefix], []
        while pending:
            folder = pending.pop()
            for entry in self._place.entries(folder):
                key = _joined(folder, entry.name)
                if deep and entry.kind == "folder" and is_component(entry.name):
                    pending.append(key)
                elif entry.kind == "file" and _is_object(folder, entry.name, temporary=temporary):
                    if entry.nbytes is None:
                        untold.append(key)
                    else:
                        yield ObjectInfo(key, entry.nbytes)
        yield from (ObjectInfo(key, nbytes) for key, nbytes in self._place.lengths(untold).items())

    def list(self, prefix: str) -> list[ObjectInfo]:
        checked_prefix(prefix)
        self._require_listing()
        return sorted(self._walk(prefix, temporary=False, deep=True), key=lambda info: info.key)

    # -- the place -----------------------------------------------------------------------------------
    def space(self) -> int | None:
        return None

    def close(self) -> None:
        """Nothing to do: open generations go on reading, and connections end with their file system."""

    def _where(self, key: str) -> str:
        return self._place.where(key)


def _joined(prefix: str, rest: str) -> str:
    return f"{prefix}/{rest}" if prefix else rest


def _is_object(prefix: str, rest: str, *, temporary: bool) -> bool:
    """Whether a listed name is that of an object, or with ``temporary`` of a leftover."""
    folders, _, name = rest.rpartition("/")
    if not all(map(is_component, folders.split("/") if folders else ())):
        return False
    if temporary:
        return is_temporary(name)
    return is_component(name) and not (_joined(prefix, rest) == name and is_catalog_file(name))
