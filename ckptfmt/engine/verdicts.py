"""Reading and creating the objects that decide a generation's fate on storage."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from ckptfmt.engine.rereading import read_whole
from ckptfmt.engine.site import Site
from ckptfmt.errors import Corrupt, FormatError, NotFound
from ckptfmt.format import layout, verdict
from ckptfmt.ports.backend import Backend
from ckptfmt.ports.records import GenerationRecord

T = TypeVar("T")


def read_commit(backend: Backend, folder: str) -> verdict.Commit | None:
    """The verdict in a generation's folder, or None if the slot is empty. Raises ``FormatError`` if it is damaged."""
    try:
        return read_object(backend, _join(folder, layout.COMMIT), verdict.decode_commit)
    except NotFound:
        return None


def read_retired(backend: Backend, folder: str) -> verdict.Retired | None:
    """The tombstone, or None. A damaged tombstone still tells that one was made: ``FormatError``."""
    try:
        return read_object(backend, _join(folder, layout.RETIRED), verdict.decode_retired)
    except NotFound:
        return None


def is_retired(backend: Backend, folder: str, key: str) -> bool:
    """Whether a tombstone stands in the folder of generation ``key``. ``Corrupt`` if it is another generation's."""
    found = read_retired(backend, folder)
    if found is not None and found.key != key:
        where = _join(folder, layout.RETIRED)
        raise Corrupt(
            f"{backend.url}: {where} is the tombstone of generation {found.key}, not of {key}; put the right object "
            "back from a copy",
            object=where,
        )
    return found is not None


def read_object(backend: Backend, key: str, decode: Callable[[bytes], T], *, limit: int = verdict.BYTES_MAX) -> T:
    """``decode`` of a small object, which is named in what that raises. It is read again before that counts."""
    return read_whole(lambda: _decode_at(backend, key, backend.read(key, limit=limit), decode))


def _decode_at(backend: Backend, key: str, data: bytes, decode: Callable[[bytes], T]) -> T:
    try:
        return decode(data)
    except Corrupt as error:
        raise Corrupt(f"{backend.url}: {key}: {error}; put it back from a copy", object=key) from error
    except FormatError as error:
        raise type(error)(f"{backend.url}: {key}: {error}") from error


def commit_of(site: Site, row: GenerationRecord) -> verdict.Commit:
    """COMMIT.json as a pure function of a committed row."""
    if row.commit_seq is None or row.committed_at is None or row.commit_fence is None:
        raise AssertionError(f"generation {row.id} is {row.state}, not committed")
    if row.manifest_name is None or row.manifest_digest is None or row.manifest_bytes is None:
        raise AssertionError(f"generation {row.id} is committed without a manifest")
    return verdict.Commit(
        verdict="committed",
        repository=site.repository,
        epoch=row.epoch,
        run=row.run,
        id=row.id,
        key=row.key,
        step=row.step,
        commit_seq=row.commit_seq,
        parent=row.parent_key,
        fence=row.commit_fence,
        manifest=verdict.ManifestRef(name=row.manifest_name, digest=row.manifest_digest, bytes=row.manifest_bytes),
        committed_at=verdict.timestamp(row.committed_at),
        tiers=row.tiers or msgspec.UNSET,
    )


def aborted_of(site: Site, row: GenerationRecord) -> verdict.Commit:
    """The aborted verdict as a pure function of an aborted row: nothing may commit under this key any more."""
    return verdict.Commit(
        verdict="aborted",
        repository=site.repository,
        epoch=row.epoch,
        run=row.run,
        id=row.id,
        key=row.key,
        step=row.step,
        fence=row.fence,
        reason=(row.abort_reason or "aborted")[:1000],
    )


def folder_of(row: GenerationRecord) -> str:
    return layout.generation_folder(row.run_key, row.key)


def belongs(found: verdict.Commit, site: Site, row: GenerationRecord) -> bool:
    """Whether a verdict speaks of this row: a folder copied over another one does not."""
    return found.repository == site.repository and found.key == row.key and found.run == row.run


def why_elsewhere(found: verdict.Commit, site: Site, run_key: str, key: str) -> str | None:
    """Why a verdict does not speak of the folder ``runs/<run_key>/<key>`` in which it lies; None if it does."""
    if found.repository != site.repository:
        return f"its verdict is of another repository ({found.repository})"
    if found.key != key:
        return f"its verdict is that of generation {found.key}: a folder was copied under another name"
    expected = layout.run_key(found.run)
    return None if expected == run_key else f"its verdict is of run {found.run!r}, whose folder is {expected}"


def check_belongs(found: verdict.Commit, key: str, folder: str) -> None:
    """Raise ``Corrupt`` if the verdict in ``folder`` is another generation's."""
    if found.key != key:
        where = _join(folder, layout.COMMIT)
        raise Corrupt(f"{where} is the verdict on generation {found.key}, not on {key}", object=where)


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name
