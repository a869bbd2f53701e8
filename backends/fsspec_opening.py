"""From a URL and its options to an fsspec file system without caches and the path of the root on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import fsspec
from fsspec.core import url_to_fs

from ckptfmt.backends.fsspec_errors import translate, without_passwords, without_secrets
from ckptfmt.backends.fsspec_kinds import SECONDS_MAX
from ckptfmt.errors import InvalidInput

PREFIX: Final = "fsspec+"
"""``fsspec+s3://...`` asks for fsspec's own driver where ckptfmt has one, too."""

_KEEPALIVE: Final = {"keepalive_interval": 15, "keepalive_count_max": 3}
"""asyncssh waits for a host that is gone for ever, unless it asks now and then."""


def is_known(scheme: str) -> bool:
    """Whether fsspec has a file system for ``scheme``, installed or not. ``a::b`` is a chain of them."""
    known = {*fsspec.available_protocols(), *fsspec.registry}
    return all(part in known for part in scheme.removeprefix(PREFIX).split("::"))


def shown(url: str) -> str:
    """``url`` as it may be told and stored: without a password, and without a slash at its end."""
    return without_passwords(url).rstrip("/")


def open_file_system(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the file system and the root's path. Connects only where its library connects at once (sftp).

    ``InvalidInput`` for an unknown scheme, a library that is not installed or options that it does not take.
    """
    inner = url.removeprefix(PREFIX)
    scheme = inner.partition("://")[0]
    if scheme in ("http", "https") and ("?" in inner or "#" in inner):
        raise InvalidInput(
            f"{shown(url.partition('?')[0])}: a URL with a query names one object, not a root; pass what the server "
            'wants to know as storage_options={"headers": {...}}'
        )
    try:
        fs, root = url_to_fs(inner, skip_instance_cache=True, **_with_keepalive(scheme, options))
    except ImportError as error:
        words = without_secrets(str(error))
        raise InvalidInput(
            f"{shown(url)}: the library for {scheme}:// is not installed: {words}; install it with pip"
        ) from error
    except TypeError as error:
        words = without_secrets(str(error))
        raise InvalidInput(
            f"storage_options for {scheme}://: {words}; known are those of fsspec's file system for it"
        ) from error
    except ValueError as error:
        raise InvalidInput(f"{shown(url)}: {without_secrets(str(error))}; check the URL and storage_options") from error
    except Exception as error:
        raise translate(error, "open", shown(url)) from error
    return unwrapped(fs, root)


def _with_keepalive(scheme: str, options: Mapping[str, Any]) -> dict[str, Any]:
    if scheme in ("sftp", "ssh"):
        cls = fsspec.get_filesystem_class(scheme)
        if cls.__module__.startswith("sshfs"):
            return {**_KEEPALIVE, **options}
    return dict(options)


def unwrapped(fs: Any, root: str) -> tuple[Any, str]:
    """Look through ``DirFileSystem``, which only joins paths, so that what is known of the file system below holds."""
    from fsspec.implementations.dirfs import DirFileSystem

    while isinstance(fs, DirFileSystem):
        fs, root = fresh(fs.fs), fs._join(root)
    return without_listings(fs), root


def fresh(fs: Any) -> Any:
    """Another file system of the same arguments, with connections of its own: after a fork, or when they were lost."""
    again = type(fs)(*fs.storage_args, **{**fs.storage_options, "skip_instance_cache": True})
    return without_listings(again)


def without_listings(fs: Any) -> Any:
    """Switch off what remembers listings, and let no answer take for ever.

    Not by an argument, since some classes hand all of theirs to a client that refuses it.
    """
    holders: tuple[Any, ...] = (fs, getattr(fs, "dircache", None))
    for holder in holders:
        if hasattr(holder, "use_listings_cache"):
            holder.use_listings_cache = False
    channel = getattr(getattr(fs, "ftp", None), "get_channel", None)
    if channel is not None:  # paramiko
        channel().settimeout(SECONDS_MAX)
    return fs
