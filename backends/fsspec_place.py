"""One root on an fsspec file system: the few questions that a backend asks, with fresh answers and our errors."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, Literal

from ckptfmt.backends.fsspec_errors import Taken, meaning, translate
from ckptfmt.backends.fsspec_kinds import Kind, kind_of, takes_range
from ckptfmt.backends.fsspec_opening import fresh
from ckptfmt.errors import BackendError, CkptError, NotFound

REQUEST_BYTES: Final = 16 << 20
"""The most that one request reads: what a file system returns is a copy in memory."""
_HEADS_AT_ONCE: Final = 16


@dataclass(frozen=True)
class Found:
    """What stands at a path."""

    name: str
    """The last component."""
    kind: Literal["file", "folder", "other"]
    nbytes: int | None
    """None where a listing does not tell."""


class Place:
    """A root on a file system. Safe to share between threads, and after a fork."""

    def __init__(self, fs: Any, root: str, url: str) -> None:
        self.url: Final = url
        self._root: Final = root.rstrip("/")
        self.kind: Final[Kind] = kind_of(fs)
        above = "/" if root.startswith("/") else str(fs.root_marker)
        self._start: Final = f"{self._root}/" if self._root else above
        self._fs = fs
        self._pid = os.getpid()
        self._lost = False
        self._renewing = threading.Lock()
        self._turn: contextlib.AbstractContextManager[Any] = (
            threading.RLock() if self.kind.serial else contextlib.nullcontext()
        )
        self._by_range: Final = takes_range(fs)
        self._ranges_proven = self.kind.create is not None

    def path(self, key: str) -> str:
        """The path of an object or folder; that of '' is the root."""
        return f"{self._start}{key}" if key else self._root or self._start

    def where(self, key: str) -> str:
        return f"{self.url}/{key}" if key else self.url

    @contextlib.contextmanager
    def calls(self, operation: str, key: str, *, offset: int | None = None) -> Iterator[Any]:
        """The file system, for calls whose errors are translated. Waits for its turn where there are turns."""
        try:
            fs = self._current()
            with self._turn:
                yield fs
        except (CkptError, Taken):
            raise
        except Exception as error:
            if self.kind.reconnects and meaning(error) == "busy":
                self._lost = True
            raise translate(error, operation, self.where(key), offset=offset) from error

    def _current(self) -> Any:
        if self._lost or self._pid != os.getpid():
            if self._pid != os.getpid():  # whoever held these in the parent does not live here
                self._renewing = threading.Lock()
                if self.kind.serial:
                    self._turn = threading.RLock()
            with self._renewing:
                if self._lost or self._pid != os.getpid():
                    self._fs = fresh(self._fs)
                    self._pid, self._lost = os.getpid(), False
        return self._fs

    # -- asking ----------------------------------------------------------------------------------
    def look(self, key: str, operation: str = "look at") -> Found | None:
        """What stands at ``key``; None: nothing. Never answered from a cache."""
        with self.calls(operation, key) as fs:
            try:
                fs.invalidate_cache()
                facts = fs.info(self.path(key))
            except Exception as error:
                if meaning(error) == "absent":
                    return None
                raise
        return _found(facts, self.path(key))

    def require_file(self, key: str, operation: str) -> int:
        """The object's length in bytes. ``NotFound`` if there is none."""
        found = self.look(key, operation)
        if found is None or found.kind != "file":
            raise NotFound(f"{operation} {self.where(key)}: no such object; list the folder for the names")
        if found.nbytes is None:
            raise BackendError(
                f"{operation} {self.where(key)}: the server does not tell the object's length; "
                "it must send Content-Length",
                kind="unsupported",
            )
        return found.nbytes

    def entries(self, key: str) -> list[Found]:
        """What stands directly in the folder ``key``, unordered; nothing if the folder is absent."""
        path = self.path(key)
        with self.calls("list", key) as fs:
            try:
                fs.invalidate_cache()
                # A page is at its name with a slash: not every server leads there from the name without.
                listed = fs.ls(f"{path.rstrip('/')}/" if self.kind.in_html else path, detail=True)
            except Exception as error:
                if meaning(error) == "absent":
                    return []
                raise
        start = path.strip("/") + "/" if path.strip("/") else ""
        names = ((facts, facts["name"].strip("/").removeprefix(start)) for facts in listed)
        # A folder's own placeholder, and what a page links to elsewhere, are no entries.
        return [_found(facts, name.removeprefix("./")) for facts, name in names if "/" not in name.removeprefix("./")]

    def everything(self, key: str) -> dict[str, int]:
        """Keys (by what follows ``key``) and lengths of all files below a folder, at any depth, in few requests."""
        path = self.path(key)
        with self.calls("list", key) as fs:
            try:
                fs.invalidate_cache()
                listed = fs.find(path, detail=True)
            except Exception as error:
                if meaning(error) == "absent":
                    return {}
                raise
        start = path.strip("/") + "/" if path.strip("/") else ""
        named = {name.strip("/"): facts for name, facts in listed.items() if facts["type"] == "file"}
        return {name.removeprefix(start): int(facts["size"]) for name, facts in named.items() if name.startswith(start)}

    def lengths(self, keys: list[str]) -> dict[str, int]:
        """The lengths of objects of which a listing told none. One that is gone by now is left out."""

        def length(key: str) -> int | None:
            try:
                return self.require_file(key, "look at")
            except NotFound:
                return None

        if not keys:
            return {}
        with ThreadPoolExecutor(min(_HEADS_AT_ONCE, len(keys)), thread_name_prefix="ckptfmt-head") as pool:
            return {key: found for key, found in zip(keys, pool.map(length, keys), strict=True) if found is not None}

    # -- reading ---------------------------------------------------------------------------------
    def read_into(self, key: str, offset: int, view: memoryview) -> int:
        """Fill ``view``; return how many bytes the object had for it. ``NotFound`` if there is no object."""
        if len(view) and not self._ranges_proven:
            self._prove_ranges(key, offset)
        done = 0
        while done < len(view):
            wanted = min(REQUEST_BYTES, len(view) - done)
            piece = self._range(key, offset + done, wanted)
            if len(piece) > wanted:
                raise self._no_ranges(key, wanted, len(piece))
            view[done : done + len(piece)] = piece
            done += len(piece)
            if not piece:
                break
        return done

    def _prove_ranges(self, key: str, offset: int) -> None:
        """Ask for one byte, once for the place: a server that sends all it has would do so for every chunk."""
        got = len(self._range(key, offset, 1))
        if got > 1:
            raise self._no_ranges(key, 1, got)
        self._ranges_proven = got == 1

    def _range(self, key: str, offset: int, nbytes: int) -> bytes:
        path = self.path(key)
        with self.calls("read", key, offset=offset) as fs:
            try:
                if self._by_range:
                    return bytes_of(fs.cat_file(path, start=offset, end=offset + nbytes))
                with fs.open(path, "rb") as file:
                    file.seek(offset)
                    return bytes_of(file.read(nbytes))
            except Exception as error:
                if meaning(error) == "beyond the end" or (meaning(error) == "unknown" and self._ends(key, offset)):
                    return b""
                raise

    def _ends(self, key: str, offset: int) -> bool:
        """Whether the object is no longer than ``offset``: some libraries say no more than that they cannot seek."""
        found = self.look(key, "read")
        return found is not None and found.nbytes is not None and found.nbytes <= offset

    def _no_ranges(self, key: str, wanted: int, got: int) -> BackendError:
        return BackendError(
            f"read {self.where(key)}: {wanted} bytes were asked for and {got} came: the server does not serve ranges, "
            "so every chunk would cost the whole object; serve the repository with one that does",
            kind="no_ranges",
        )

    # -- changing --------------------------------------------------------------------------------
    def remove(self, key: str) -> None:
        """Remove a file; absent is success, and a folder is no file."""
        found = self.look(key, "delete")
        if found is None or found.kind == "folder":
            return
        with self.calls("delete", key) as fs:
            try:
                fs.rm_file(self.path(key))
            except Exception as error:
                if meaning(error) != "absent":
                    raise

    def make_folders(self, key: str) -> None:
        with self.calls("make folder", key) as fs:
            fs.makedirs(self.path(key), exist_ok=True)


def bytes_of(data: Any) -> bytes:
    return data if isinstance(data, bytes) else bytes(data)


def _found(facts: Any, name: str) -> Found:
    size = facts.get("size")
    kind: Literal["file", "folder", "other"] = "other"
    if facts["type"] == "file":
        kind = "file"
    elif facts["type"] == "directory":
        kind = "folder"
    return Found(name.strip("/").rpartition("/")[2], kind, None if size is None else int(size))
