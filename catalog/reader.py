"""The reading half of a catalog in a SQL database, and the catalog that has no other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, NoReturn

from ckptfmt.catalog.database import Sessions
from ckptfmt.catalog.failures import translated
from ckptfmt.catalog.queries import events, generations, identity, launches, messages, packs, runs, tiers, views
from ckptfmt.catalog.snapshot import Snapshot
from ckptfmt.errors import CatalogError
from ckptfmt.format.states import State
from ckptfmt.ports.records import (
    CatalogIdentity,
    EventRecord,
    GenerationRecord,
    LaunchRecord,
    PackRecord,
    RankRecord,
    ReplicaRecord,
    RunRecord,
    TierRecord,
)


class CatalogReader:
    """Every question of ``ckptfmt.ports.catalog.Catalog``. Safe to use from any thread."""

    def __init__(self, sessions: Sessions, *, url: str, repository: str, repository_id: int) -> None:
        self._sessions = sessions
        self._url = url
        self._repository = repository
        self._repository_id = repository_id

    @property
    def url(self) -> str:
        return self._url

    def close(self) -> None:
        self._sessions.close()

    @contextmanager
    def _reading(self) -> Iterator[Snapshot]:
        with translated(self._url), self._sessions.read() as snapshot:
            yield snapshot

    def identity(self) -> CatalogIdentity:
        with self._reading() as snapshot:
            return identity.identity(snapshot)

    def root_url(self) -> str:
        with self._reading() as snapshot:
            found = identity.repository(snapshot, self._repository)
        if found is None:
            raise CatalogError(f"the catalog {self._url} no longer knows its repository: run `ckptfmt db check`")
        return found[1]

    def database_now(self) -> datetime:
        with self._reading() as snapshot:
            return identity.now(snapshot)

    # -- runs and launches ---------------------------------------------------------------------
    def runs(self) -> list[RunRecord]:
        with self._reading() as snapshot:
            return runs.every(snapshot, self._repository_id)

    def live_launch(self, run: str) -> LaunchRecord | None:
        with self._reading() as snapshot:
            return launches.live(snapshot, self._repository_id, run)

    def launches(self, run: str) -> list[LaunchRecord]:
        with self._reading() as snapshot:
            return launches.every(snapshot, self._repository_id, run)

    def launch(self, launch_id: int) -> LaunchRecord:
        with self._reading() as snapshot:
            return launches.by_id(snapshot, self._repository_id, launch_id)

    def last_committed_of(self, launch_id: int) -> GenerationRecord | None:
        with self._reading() as snapshot:
            return generations.last_committed_of(snapshot, self._repository_id, launch_id)

    # -- generations ---------------------------------------------------------------------------
    def generation(self, generation_id: int) -> GenerationRecord | None:
        with self._reading() as snapshot:
            return generations.find(snapshot, self._repository_id, generation_id)

    def generation_by_key(self, key: str) -> GenerationRecord | None:
        with self._reading() as snapshot:
            return generations.by_key(snapshot, self._repository_id, key)

    def states(self) -> dict[str, tuple[State, int | None]]:
        with self._reading() as snapshot:
            return generations.states(snapshot, self._repository_id)

    def generations(
        self, *, run: str | None = None, states: Sequence[State] | None = None, limit: int | None = None
    ) -> list[GenerationRecord]:
        with self._reading() as snapshot:
            return generations.listing(snapshot, self._repository_id, run=run, states=states, limit=limit)

    def latest(self, run: str) -> GenerationRecord | None:
        with self._reading() as snapshot:
            return generations.latest(snapshot, self._repository_id, run)

    def unproven(self, run: str) -> list[GenerationRecord]:
        with self._reading() as snapshot:
            return generations.unproven(snapshot, self._repository_id, run)

    def committed_at_step(self, run: str, step: int) -> GenerationRecord | None:
        with self._reading() as snapshot:
            return generations.committed_at_step(snapshot, self._repository_id, run, step)

    def tagged(self, run: str, tag: str) -> GenerationRecord | None:
        with self._reading() as snapshot:
            return generations.tagged(snapshot, self._repository_id, run, tag)

    def ranks(self, generation_id: int) -> list[RankRecord]:
        with self._reading() as snapshot:
            return generations.ranks_of(snapshot, self._repository_id, generation_id)

    def packs(self, generation_id: int) -> list[PackRecord]:
        with self._reading() as snapshot:
            return packs.of_generation(snapshot, self._repository_id, generation_id)

    def pack_users(self, generation_key: str, name: str) -> list[int]:
        with self._reading() as snapshot:
            return packs.users(snapshot, self._repository_id, generation_key, name)

    # -- tiers ---------------------------------------------------------------------------------
    def tiers(self) -> list[TierRecord]:
        with self._reading() as snapshot:
            return tiers.every(snapshot, self._repository_id)

    def replicas(self, generation_id: int) -> list[ReplicaRecord]:
        with self._reading() as snapshot:
            return tiers.replicas_of(snapshot, self._repository_id, generation_id)

    def unreplicated(self, run: str, tier: str) -> list[GenerationRecord]:
        with self._reading() as snapshot:
            return generations.unreplicated(snapshot, self._repository_id, run, tier)

    def bytes_held(self, run: str | None = None) -> int:
        with self._reading() as snapshot:
            return tiers.bytes_held(snapshot, self._repository_id, run)

    # -- messages of a launch ------------------------------------------------------------------
    def posts(self, launch_id: int, topic: str) -> dict[int, Mapping[str, Any]]:
        with self._reading() as snapshot:
            return messages.of_topic(snapshot, self._repository_id, launch_id, topic)

    # -- history and views ---------------------------------------------------------------------
    def events(
        self, *, run: str | None = None, generation_id: int | None = None, limit: int | None = None
    ) -> list[EventRecord]:
        with self._reading() as snapshot:
            return events.history(snapshot, self._repository_id, run=run, generation_id=generation_id, limit=limit)

    def view(self, name: str, *, run: str | None = None) -> list[dict[str, Any]]:
        with self._reading() as snapshot:
            return views.view(snapshot, self._repository, name, run)


class ReadOnlyCatalog(CatalogReader):
    """A catalog that was opened for reading: whatever would change it is refused."""

    read_only = True

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise CatalogError(
            f"the catalog {self._url} was opened for reading: open the repository with mode='w'", kind="read_only"
        )

    ensure_run = acquire_launch = join_launch = renew_lease = close_launch = set_restored_from = _refuse
    begin_save = skip_save = report_rank = report_ranks = mark_durable = commit = set_proven = abort = adopt = _refuse
    retire = mark_swept = tag = untag = pin = unpin = quarantine = open_reader = close_reader = note = _refuse
    moved_to = set_retention_hold = restore = post = forget_posts = report_progress = _refuse
    ensure_tier = forget_tier = note_replicas = mark_replicated = drop_replicas = _refuse
