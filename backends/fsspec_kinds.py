"""What is known of the file systems that fsspec offers: how they publish an object, and what their word is worth.

fsspec's interface cannot be asked. ``mode="create"`` of an implementation that has no such thing looks and then writes
over what came in between, ``cat_file`` of another reads all for one byte. So what may be relied on stands here, by
class; a class that does not stand here is read from, and written to only by a user who vouches for being alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

Create = Literal["mode", "link", "memory"]


@dataclass(frozen=True)
class Kind:
    """What is known of one implementation."""

    create: Create | None = None
    """How an object is published only if its name is free: by the store's own condition (``mode="create"``), by a hard
    link from a temporary name, or under this process's lock. None: not at all."""
    durable: str = "what this file system's library promises when it closes a file, which is not known here"
    survives_power_loss: bool = False
    folders: bool = False
    """A folder has to exist before an object is written into it, and its absence can be seen."""
    distant: bool = True
    """Every request waits for a round trip."""
    writable: bool = True
    flat: bool = False
    """``find`` lists everything below a prefix in a few requests, and tells errors."""
    serial: bool = True
    """One call at a time: the library's connection is not safe to share between threads."""
    reconnects: bool = False
    """A connection that was lost is not made again by the library."""
    in_html: bool = False
    """Listings are pages for people; a server may have none, and says no sizes."""
    upload: Mapping[str, Any] = field(default_factory=dict)
    """Options of ``put_file`` that bound its memory."""
    link: Callable[[Any, str, str], None] | None = None
    sync: Callable[[Any, str], None] | None = None
    """Make a whole file durable, where the protocol has a word for it."""


_SSH_FXP_EXTENDED: Final = 200
"""The protocol's number for a request that is known by a name (draft-ietf-secsh-filexfer-02)."""


def _link_local(fs: Any, source: str, target: str) -> None:
    fs.link(source, target)


def _link_paramiko(fs: Any, source: str, target: str) -> None:
    # The protocol's own rename may or may not refuse a taken name, by the server; a hard link always does.
    fs.ftp._request(_SSH_FXP_EXTENDED, "hardlink@openssh.com", source, target)


def _sync_paramiko(fs: Any, path: str) -> None:
    with fs.ftp.open(path, "r+") as file:
        fs.ftp._request(_SSH_FXP_EXTENDED, "fsync@openssh.com", file.handle)


def _link_asyncssh(fs: Any, source: str, target: str) -> None:
    from fsspec.asyn import sync

    async def link() -> None:
        async with fs._pool.get() as channel:
            await channel.link(source, target)

    sync(fs.loop, link, timeout=SECONDS_MAX)


def _sync_asyncssh(fs: Any, path: str) -> None:
    from fsspec.asyn import sync

    async def fsync() -> None:
        async with fs._pool.get() as channel, channel.open(path, "r+b") as file:
            await file.fsync()

    sync(fs.loop, fsync, timeout=SECONDS_MAX)


SECONDS_MAX: Final = 120.0
"""How long one answer may take where the library would wait for ever."""

_STORE: Final = "the store has acknowledged the object, as durable as the store's promise"
_SFTP: Final = "the server has written the object; its file is synced where the server can (fsync@openssh.com)"

_KINDS: Final[dict[str, Kind]] = {
    "fsspec.implementations.memory.MemoryFileSystem": Kind(
        create="memory",
        durable="in this process's memory only: gone when it ends",
        folders=True,
        distant=False,
        flat=True,
        serial=False,
    ),
    "fsspec.implementations.local.LocalFileSystem": Kind(
        create="link",
        durable="handed to the system but never synced: a power cut may lose it (a path without fsspec+ is synced)",
        folders=True,
        distant=False,
        serial=False,
        link=_link_local,
    ),
    "fsspec.implementations.sftp.SFTPFileSystem": Kind(
        create="link",
        durable=_SFTP,
        folders=True,
        reconnects=True,
        link=_link_paramiko,
        sync=_sync_paramiko,
    ),
    "sshfs.spec.SSHFileSystem": Kind(
        create="link",
        durable=_SFTP,
        folders=True,
        serial=False,
        reconnects=True,
        link=_link_asyncssh,
        sync=_sync_asyncssh,
    ),
    "s3fs.core.S3FileSystem": Kind(
        create="mode",
        durable=_STORE,
        survives_power_loss=True,
        flat=True,
        serial=False,
        upload={"chunksize": 16 << 20, "max_concurrency": 4},
    ),
    "gcsfs.core.GCSFileSystem": Kind(
        create="mode", durable=_STORE, survives_power_loss=True, flat=True, serial=False, upload={"chunksize": 16 << 20}
    ),
    "adlfs.spec.AzureBlobFileSystem": Kind(
        create="mode", durable=_STORE, survives_power_loss=True, flat=True, serial=False, upload={"max_concurrency": 4}
    ),
    "fsspec.implementations.http.HTTPFileSystem": Kind(writable=False, serial=False, in_html=True),
    "fsspec.implementations.github.GithubFileSystem": Kind(writable=False),
    "fsspec.implementations.zip.ZipFileSystem": Kind(writable=False),
    "fsspec.implementations.tar.TarFileSystem": Kind(writable=False),
    "fsspec.implementations.libarchive.LibArchiveFileSystem": Kind(writable=False),
    "fsspec.implementations.reference.ReferenceFileSystem": Kind(writable=False, serial=False),
}


def kind_of(fs: Any) -> Kind:
    """What is known of ``fs``; of a subclass, what is known of its base. Unknown ones are asked one call at a time."""
    for cls in type(fs).__mro__:
        known = _KINDS.get(f"{cls.__module__}.{cls.__qualname__}")
        if known is not None:
            return known
    return Kind(serial=not getattr(fs, "async_impl", False))


def takes_range(fs: Any) -> bool:
    """Whether ``cat_file`` has a range at all: that of sshfs takes the arguments, and reads everything."""
    method = fs._cat_file if getattr(fs, "async_impl", False) else fs.cat_file
    return "start" in inspect.signature(method).parameters


def has_own_rename(fs: Any) -> bool:
    """Whether ``mv`` is the file system's own rename, and not fsspec's copy and delete."""
    from fsspec import AbstractFileSystem

    return type(fs).mv is not AbstractFileSystem.mv
