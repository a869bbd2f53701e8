"""A committed generation, opened: its manifest read and proven, every pack present with its length."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ckptfmt.engine import verdicts
from ckptfmt.engine.collector import held_back
from ckptfmt.engine.nearest import Nearest
from ckptfmt.engine.origins import Origins
from ckptfmt.engine.reports import GenerationInfo
from ckptfmt.engine.rereading import read_whole
from ckptfmt.engine.site import Site
from ckptfmt.engine.stored import Stored, StoredTensors
from ckptfmt.errors import BackendError, Corrupt, FormatError, NotCommitted, NotFound
from ckptfmt.format import layout, tree, verdict
from ckptfmt.format.index import Index
from ckptfmt.format.manifest import MANIFEST_BYTES_MAX, Manifest, decode_manifest, manifest_digest
from ckptfmt.format.trees import TreeTexts
from ckptfmt.ports.records import GenerationRecord

log = logging.getLogger("ckptfmt")


@dataclass(frozen=True)
class Opened:
    """What readers work on. ``folder`` is the generation's key prefix ('' for a folder opened by itself)."""

    site: Site
    folder: str
    info: GenerationInfo
    manifest: Manifest

    @cached_property
    def index(self) -> Index:
        return Index(self.manifest)

    @property
    def common(self) -> tree.Node:
        """The state of all ranks. ``FormatError`` at first use if its text is none, as of ``slots``."""
        with self._told():
            return self.manifest.trees.common

    @property
    def name(self) -> str:
        return f"generation {self.info.id} of run {self.info.run!r}"

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the job that saved it, ascending. Those that were no members of the save kept nothing."""
        return tuple(row.rank for row in self.manifest.ranks)

    @property
    def ranks_text(self) -> str:
        return "1 rank" if len(self.ranks) == 1 else f"{len(self.ranks)} ranks"

    def slots(self, rank: int) -> dict[str, tree.Node]:
        """What ``rank`` kept for itself, by slot."""
        with self._told():
            return self.manifest.trees.slots_of(rank)

    def keepers(self, slot: str | None = None) -> list[int]:
        """The ranks that kept something for themselves, ascending: under ``slot``, or under any. No tree is read."""
        trees = self.manifest.trees
        kept = trees.slot_texts() if isinstance(trees, TreeTexts) else trees.per_rank
        return sorted(int(rank) for rank, slots in kept.items() if (slots if slot is None else slot in slots))

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except FormatError as error:
            raise type(error)(
                f"{self.site.backend.url}: {self.name}: {error}; its tensors can still be read by name"
            ) from error

    @cached_property
    def nearest(self) -> Nearest:
        """What its packs are read through."""
        return Nearest(self.site)

    def require_packs(self) -> None:
        """Every pack is on some tier with its length: ``NotFound`` or ``Corrupt`` naming those that are on none.

        They are looked at once.
        """
        _ = self._has_packs

    @cached_property
    def _has_packs(self) -> bool:
        with self.noting_damage():
            self.nearest.require(self.folder, self.manifest)
        return True

    @contextmanager
    def noting_damage(self) -> Iterator[None]:
        """Around reading: what was found damaged is left as events in the catalog."""
        try:
            yield
        finally:
            self.nearest.log.note(self.site, self.info)

    @cached_property
    def _origins(self) -> Origins:
        return Origins(self.manifest)

    def saved_as(self, stored_name: str) -> str:
        """The word of the array library that a tensor came from: ``tensor`` (torch) or ``array`` (numpy, bytes)."""
        return self._origins.of(stored_name)

    @cached_property
    def stored(self) -> StoredTensors:
        """Its tensors, with the objects that hold their bytes."""
        return StoredTensors(self.index, [self.pack_key(pack.name, pack.generation) for pack in self.manifest.packs])

    def tensor(self, name: str, rank: int | None = None) -> Stored:
        return self.stored.find(name, rank)

    def metadata(self) -> Any:
        """The user's metadata, rebuilt."""
        return tree.decode(self.manifest.metadata, _no_tensors, lenient=True)

    def pack_key(self, name: str, generation: str | None) -> str:
        place = self.folder if generation is None else f"{self.folder.rpartition('/')[0]}/{generation}"
        return f"{place}/{name}" if place else name


def _no_tensors(tag: str, payload: Any) -> Any:
    raise FormatError(f"metadata holds a {tag}, which it must not")


def open_row(site: Site, row: GenerationRecord) -> Opened:
    """Open what the catalog calls committed. ``Corrupt`` or ``NotFound`` name the object that is damaged or gone."""
    if row.manifest_name is None or row.manifest_digest is None:
        raise NotCommitted(f"generation {row.id} of run {row.run!r} is {row.state}, not committed; nothing to read")
    folder = verdicts.folder_of(row)
    manifest = _nearest_manifest(site, folder, row.manifest_name, row.manifest_digest, row.key)
    told_by = f"the catalog's row of generation {row.id}"
    _check_facts(site, folder, manifest, run=row.run, step=row.step, told_by=told_by)
    opened = Opened(site, folder, GenerationInfo.of(row), manifest)
    opened.require_packs()
    return opened


def open_proven(site: Site, folder: str, commit: verdict.Commit, *, stands: bool = False) -> Opened:
    """Open what COMMIT.json proves, without a catalog. ``stands``: it is known to have no tombstone.

    Where a request costs a round trip packs are not looked at before they are read: an inference host reads few of
    them, and what is gone or too short is told by the first read.
    """
    if commit.verdict != "committed" or commit.manifest is None:
        raise NotCommitted(f"{folder or site.backend.url}: generation {commit.id} was aborted: {commit.reason}")
    if not stands and verdicts.is_retired(site.backend, folder, commit.key):
        raise NotCommitted(
            f"{folder or site.backend.url}: generation {commit.id} of run {commit.run!r} was retired; "
            "its bytes may be gone"
        )
    manifest = _nearest_manifest(site, folder, commit.manifest.name, commit.manifest.digest, commit.key)
    _check_facts(site, folder, manifest, run=commit.run, step=commit.step, told_by=layout.COMMIT)
    opened = Opened(site, folder, info_of(commit, manifest), manifest)
    if not site.backend.traits.distant:
        opened.require_packs()
    return opened


def _check_facts(site: Site, folder: str, manifest: Manifest, *, run: str, step: int, told_by: str) -> None:
    """Whoever resumes goes by run and step: what chose the generation has to tell those that its bytes belong to."""
    if (manifest.run, manifest.step) != (run, step):
        raise Corrupt(
            f"{site.backend.url}: {told_by} tells run {run!r}, step {step}; the manifest in "
            f"{folder or 'its folder'} run {manifest.run!r}, step {manifest.step}: one of them is damaged; restore an "
            "older generation with at=..., or put it back from a copy",
            object=folder or None,
        )


def info_of(commit: verdict.Commit, manifest: Manifest | None = None) -> GenerationInfo:
    """What a committed verdict tells of its generation."""
    from datetime import datetime  # only by proof

    def moment(text: str | None) -> datetime | None:
        return None if text is None else datetime.fromisoformat(text)

    return GenerationInfo(
        id=commit.id,
        key=commit.key,
        run=commit.run,
        step=commit.step,
        state=commit.verdict,
        nbytes=None if manifest is None else manifest.nbytes,
        tags=(),
        parent_key=commit.parent,
        commit_seq=commit.commit_seq,
        world_size=None if manifest is None else len(manifest.ranks),
        created_at=None if manifest is None else moment(manifest.created_at),
        durable_at=None,
        committed_at=moment(commit.committed_at),
        proven_at=moment(commit.committed_at),
        stall_seconds=None,
        abort_reason=commit.reason,
    )


def _nearest_manifest(site: Site, folder: str, name: str, digest: str, key: str) -> Manifest:
    """From the durable tier, else from a replica that has it: its digest tells that it is the one."""
    try:
        return read_manifest(site, folder, name, digest, key)
    except (Corrupt, NotFound, BackendError) as error:
        for tier in site.tiers.replicas:
            try:
                found = read_manifest(replace(site, backend=tier.backend), folder, name, digest, key)
            except (FormatError, NotFound, BackendError):
                continue
            log.warning("the manifest is read from %s: %s", tier.name, error)
            return found
        raise


def _stored_manifest(site: Site, where: str, digest: str) -> bytes:
    try:
        stored = site.backend.read(where, limit=MANIFEST_BYTES_MAX)
    except NotFound as error:
        raise NotFound(
            f"{site.backend.url}: the manifest {where} is not there; restore an older generation with at=..., or put "
            "the object back from a copy",
            kind="object_missing",
        ) from error
    if manifest_digest(stored) != digest:
        raise Corrupt(
            f"{site.backend.url}: the bytes of {where} hash to {manifest_digest(stored)}, recorded is {digest}; "
            "restore an older generation with at=..., or put the object back from a copy",
            object=where,
        )
    return stored


def read_manifest(site: Site, folder: str, name: str, digest: str, key: str) -> Manifest:
    """Read a manifest and compare its stored bytes with the digest that the commit recorded."""
    where = f"{folder}/{name}" if folder else name
    try:
        layout.validate_plain_name(name)
    except FormatError as error:
        raise type(error)(f"{site.backend.url}: generation {key}: its manifest cannot be found: {error}") from error
    stored = read_whole(lambda: _stored_manifest(site, where, digest))
    try:
        with held_back():
            manifest = decode_manifest(stored)
    except FormatError as error:
        raise type(error)(f"{site.backend.url}: {where}: {error}") from error
    if manifest.key != key:
        raise Corrupt(
            f"{site.backend.url}: {where} is the manifest of generation {manifest.key}, not of {key}", object=where
        )
    return manifest
