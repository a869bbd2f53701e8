"""Objects as files below one folder: NVMe, other local disks, NFS.

Written for power cuts: an object is durable when its file *and* its folder have been synced, and a
failed sync makes it dead. Nothing is ever overwritten or renamed over.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from ckptfmt.backends.buffers import flat_bytes
from ckptfmt.backends.discreet_options import chosen
from ckptfmt.backends.keys import is_catalog_file, is_component, is_temporary
from ckptfmt.backends.posix_create import Creation
from ckptfmt.backends.posix_descriptors import opened
from ckptfmt.backends.posix_direct import BLOCK, DirectRules
from ckptfmt.backends.posix_errors import translate, translated
from ckptfmt.backends.posix_folders import Folders
from ckptfmt.backends.posix_mapping import MappedRange, map_cached
from ckptfmt.backends.posix_names import Names
from ckptfmt.backends.posix_place import ABSENT, Place
from ckptfmt.backends.posix_read_back import ReadBack
from ckptfmt.backends.posix_reader import OPEN_TO_READ, PosixReader, require_regular
from ckptfmt.backends.posix_writer import PosixWriter, WriterTools
from ckptfmt.backends.syscalls import Syscalls
from ckptfmt.errors import InvalidInput
from ckptfmt.ports.backend import Buffer, ObjectInfo, Traits

_LARGEST: Final = 2**63 - 1 - BLOCK
_STAYS: Final = frozenset({errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EBUSY})
"""rmdir's ways to say that there is no empty folder of that name."""


class PosixOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``storage_options`` of a ``file://`` repository."""

    direct: bool | None = None
    """Direct I/O (``O_DIRECT``): None = where it works, True = an error where it does not, False = never."""
    read_back: bool | None = None
    """Compare what was written with what the file system gives back, past this machine's page cache, before it counts
    as durable: None = on file systems that other machines share."""


class PosixBackend:
    """A ``Backend`` on a file system. Constructing it touches nothing; ``create_root`` makes the root."""

    def __init__(
        self, root: str | Path, options: PosixOptions | None = None, *, syscalls: Syscalls | None = None
    ) -> None:
        self._options: Final = options or PosixOptions()
        self._sys: Final = syscalls if syscalls is not None else Syscalls()
        self._place: Final = Place(os.path.abspath(root), self._sys)
        self._names: Final = Names(self._place, self._sys)
        self._folders: Final = Folders(self._place.root, self._names, self._sys)
        self._rules: Final = DirectRules(self._sys, self._options.direct)
        self._reader: Final = PosixReader(self._rules, self._names, self._sys)
        self._traits: Traits | None = None

    @property
    def url(self) -> str:
        return Path(self._folders.root).as_uri()

    @property
    def storage_options(self) -> Mapping[str, Any]:
        return chosen(self._options)

    @property
    def traits(self) -> Traits:
        if self._traits is None:
            with translated("look at", self._folders.root):
                in_memory = self._place.is_in_memory()
                self._traits = Traits(
                    scheme="file",
                    durable=self._promise(in_memory),
                    survives_power_loss=not in_memory,
                    local=self._place.is_local(),
                    alignment=BLOCK,
                    folders=True,
                )
        return self._traits

    def _promise(self, in_memory: bool) -> str:
        if in_memory:
            return "in this machine's memory only: gone at the next boot"
        synced = "file and folder have been synced (fsync)"
        if self._read_back() is not None:
            synced += " and the bytes read back past this machine's cache"
        return f"{synced}, as durable as the file system's promise"

    def _read_back(self) -> ReadBack | None:
        wanted = self._options.read_back
        if not (self._place.is_remote() if wanted is None else wanted):
            return None
        return ReadBack(self._names, self._sys, direct=self._options.direct is not False)

    # -- folders -------------------------------------------------------------------------------
    def create_root(self) -> None:
        """Make the root folder if it is absent, durably, and prove that this process may write there.

        ``AccessDenied`` on a read-only file system or without permission, ``Conflict`` if a file is in the way.
        A full one is no error here: whoever wants to free space there has to get in.
        """
        with translated("make repository root", self._folders.root):
            self._folders.create_root()
            self._folders.prove_writable()

    def make_folder(self, prefix: str) -> None:
        with translated("make folder", os.path.join(self._folders.root, prefix)):
            self._folders.make(prefix)

    def has_folder(self, prefix: str) -> bool:
        path = self._folders.folder_path(prefix, "look for folder")
        with translated("look for folder", path):
            return self._folders.is_folder(path)

    def remove_folder(self, prefix: str) -> None:
        path = self._folders.folder_path(prefix, "remove folder")
        if not prefix:
            return
        with translated("remove folder", path):
            try:
                self._sys.rmdir(path)
            except OSError as error:
                if error.errno not in _STAYS:
                    raise

    # -- writing -------------------------------------------------------------------------------
    def create(self, key: str, data: Buffer) -> None:
        path = self._folders.object_path(key, "create")
        view = flat_bytes(data, f"create {path}")
        with translated("create", path, needed=len(view), free=self._place.room_or_none):
            Creation(self._folders, self._names, self._read_back(), self._sys).create(path, view)

    def open_writer(self, key: str, nbytes: int, *, write_bytes: int = 0) -> PosixWriter:
        path = self._folders.object_path(key, "write")
        if not 0 <= nbytes <= _LARGEST:
            raise InvalidInput(f"write {path}: {nbytes} is no size of a file; give 0 to {_LARGEST} bytes")
        with translated("write", path, needed=nbytes, free=self._place.room_or_none):
            tools = WriterTools(self._place, self._names, self._folders, self._rules, self._read_back(), self._sys)
            writer = PosixWriter(path, nbytes, tools)
            writer.open()
        return writer

    def sync(self, key: str) -> None:
        path = self._folders.object_path(key, "sync")
        with translated("sync", path):
            with opened(self._names, path, OPEN_TO_READ, writing=True) as descriptor:
                self._sys.fsync(descriptor)
            self._folders.sync(os.path.dirname(path))

    def delete(self, key: str) -> None:
        path = self._folders.object_path(key, "delete")
        with translated("delete", path):
            self._unlink(path)

    def _unlink(self, path: str) -> None:
        try:
            self._names.unlink(path)
        except FileNotFoundError:
            pass  # the sync below still counts: whoever removed it may have died before its own
        except NotADirectoryError:
            return
        except OSError as error:
            # A folder of that name (EISDIR on Linux, EPERM elsewhere) is no object.
            if error.errno not in (errno.EISDIR, errno.EPERM) or not stat.S_ISDIR(self._names.facts(path).st_mode):
                raise
            return
        try:
            self._folders.sync(os.path.dirname(path))
        except FileNotFoundError:
            return

    def sweep_debris(
        self, prefix: str, *, dry_run: bool, deep: bool = True, only: Collection[str] | None = None
    ) -> list[ObjectInfo]:
        path = self._folders.folder_path(prefix, "sweep")
        with translated("sweep", path):
            walked = sorted(self._walk(path, prefix, temporary=True, deep=deep), key=lambda info: info.key)
            found = [info for info in walked if only is None or info.key in only]
            if not dry_run:
                for info in found:
                    self._unlink(os.path.join(self._folders.root, info.key))
        return found

    # -- reading -------------------------------------------------------------------------------
    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        path = self._folders.object_path(key, "read")
        view = flat_bytes(buffer, f"read {path} at offset {offset}")
        if offset < 0 or buffer.readonly:
            raise InvalidInput(f"read {path} at offset {offset}: give an offset of at least 0 and a writable buffer")
        try:
            self._reader.read_into(path, offset, view)
        except OSError as error:
            raise translate(error, "read", path, offset=offset) from error

    def map_cached(self, key: str, offset: int, memory: memoryview) -> MappedRange | None:
        path = self._folders.object_path(key, "read")
        if not self.traits.local:
            return None
        with translated("read", path):
            return map_cached(path, offset, memory, self._sys)

    def read(self, key: str, *, limit: int) -> bytes:
        path = self._folders.object_path(key, "read")
        with translated("read", path):
            return self._reader.read_whole(path, limit)

    def head(self, key: str) -> ObjectInfo:
        path = self._folders.object_path(key, "look at")
        with translated("look at", path):
            facts = self._names.facts(path)
            require_regular(facts, path)
            return ObjectInfo(key, facts.st_size)

    def list_folders(self, prefix: str) -> list[str]:
        path = self._folders.folder_path(prefix, "list")
        with translated("list", path):
            entries = self._entries(path, prefix)
            return sorted(entry.name for entry in entries if self._is_folder(entry))

    def _walk(self, path: str, prefix: str, *, temporary: bool, deep: bool = True) -> Iterator[ObjectInfo]:
        """Yield the objects (or, with ``temporary``, the leftovers of creates) below ``path``, unordered."""
        pending = [(path, prefix)]
        while pending:
            folder, key = pending.pop()
            for entry in self._entries(folder, key, temporary=temporary):
                name = f"{key}/{entry.name}" if key else entry.name
                if deep and self._is_folder(entry):
                    pending.append((entry.path, name))
                elif entry.is_file(follow_symlinks=False) and is_temporary(entry.name) == temporary:
                    try:
                        yield ObjectInfo(name, self._sys.lstat(entry.path).st_size)
                    except FileNotFoundError:
                        continue  # removed since the folder was read

    def _entries(self, path: str, prefix: str, *, temporary: bool = False) -> list[os.DirEntry[str]]:
        try:
            entries = self._names.entries(path)
        except ABSENT:
            return []
        return [
            entry
            for entry in entries
            if (is_component(entry.name) and not (prefix == "" and is_catalog_file(entry.name)))
            or (temporary and is_temporary(entry.name))
        ]

    def _is_folder(self, entry: os.DirEntry[str]) -> bool:
        if entry.is_symlink():
            self._folders.tell_symlink(entry.path)
            return False
        return entry.is_dir(follow_symlinks=False)

    def list(self, prefix: str) -> list[ObjectInfo]:
        path = self._folders.folder_path(prefix, "list")
        with translated("list", path):
            return sorted(self._walk(path, prefix, temporary=False), key=lambda info: info.key)

    # -- the place -----------------------------------------------------------------------------
    def space(self) -> int | None:
        with translated("ask for the free space of", self._folders.root):
            room = self._place.room()
            return None if room is None else room.nbytes

    def close(self) -> None:
        """Nothing to release: descriptors live only as long as a call or a writer."""
