"""``SqlCatalog``: the catalog of one repository in a SQL database.

A thin front: it opens the transaction, translates database errors, and hands the work to the room of the noun.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Protocol

from sqlalchemy import Connection, select

from ckptfmt.catalog import events, generations, launches, packs, readers, reading, retention, runs, saves
from ckptfmt.catalog.failures import translated
from ckptfmt.catalog.schema import generations as table
from ckptfmt.catalog.schema import repositories
from ckptfmt.catalog.transaction import Transaction
from ckptfmt.errors import CatalogError, NotFound
from ckptfmt.format.states import State
from ckptfmt.ports.catalog import (
    AdoptFacts,
    CatalogIdentity,
    DurableFacts,
    EventRecord,
    GenerationRecord,
    LaunchRecord,
    LaunchRequest,
    PackRecord,
    RankRecord,
    RankState,
    RunRecord,
    SaveTicket,
)


class Sessions(Protocol):
    """Where transactions come from: one implementation per database."""

    def read(self) -> Any:
        """Context manager of a ``Connection`` in a consistent snapshot."""

    def write(self) -> Any:
        """Context manager of a ``Connection`` whose changes are committed at its end."""

    def close(self) -> None: ...


class SqlCatalog:
    """Implements ``ckptfmt.ports.catalog.Catalog``. Safe to use from any thread."""

    def __init__(self, sessions: Sessions, *, url: str, repository: str, read_only: bool) -> None:
        self._sessions = sessions
        self._url = url
        self._repository = repository
        self._read_only = read_only
        with self._reading() as connection:
            found = connection.execute(
                select(repositories.c.id).where(repositories.c.uuid == repository)
            ).scalar_one_or_none()
        if found is None:
            raise NotFound(
                f"the catalog {url} does not know the repository {repository}: name the catalog that governs it "
                "(catalog=... or CKPTFMT_CATALOG)"
            )
        self._repository_id: int = found

    @property
    def url(self) -> str:
        return self._url

    @property
    def read_only(self) -> bool:
        return self._read_only

    def close(self) -> None:
        self._sessions.close()

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        with translated(self._url), self._sessions.read() as connection:
            yield connection

    @contextmanager
    def _writing(self) -> Iterator[Transaction]:
        if self._read_only:
            raise CatalogError(
                f"the catalog {self._url} was opened for reading: open the repository with mode='w'",
                kind="read_only",
            )
        with translated(self._url), self._sessions.write() as connection:
            yield Transaction(connection, self._repository_id, self._url)

    # -- runs and launches ---------------------------------------------------------------------
    def identity(self) -> CatalogIdentity:
        with self._reading() as connection:
            return reading.identity(connection)

    def database_now(self) -> datetime:
        with self._reading() as connection:
            return reading.now(connection)

    def ensure_run(self, name: str, key: str) -> RunRecord:
        with self._writing() as tx:
            return runs.ensure(tx, name, key)

    def runs(self) -> list[RunRecord]:
        with self._reading() as connection:
            return runs.every(connection, self._repository_id)

    def live_launch(self, run: str) -> LaunchRecord | None:
        with self._reading() as connection:
            return launches.live(connection, self._repository_id, run)

    def launches(self, run: str) -> list[LaunchRecord]:
        with self._reading() as connection:
            return launches.every(connection, self._repository_id, run)

    def launch(self, launch_id: int) -> LaunchRecord:
        with self._reading() as connection:
            return launches.by_id(connection, self._repository_id, launch_id)

    def last_committed_of(self, launch_id: int) -> GenerationRecord | None:
        with self._reading() as connection:
            return reading.last_committed_of(connection, self._repository_id, launch_id)

    def acquire_launch(
        self, run: str, request: LaunchRequest, *, lease_seconds: float, displace: int | None = None
    ) -> LaunchRecord:
        with self._writing() as tx:
            return launches.acquire(tx, run, request, lease_seconds=lease_seconds, displace=displace)

    def renew_lease(self, launch_id: int, *, lease_seconds: float, last_step: int | None = None) -> LaunchRecord:
        with self._writing() as tx:
            return launches.renew(tx, launch_id, lease_seconds=lease_seconds, last_step=last_step)

    def close_launch(self, launch_id: int) -> None:
        with self._writing() as tx:
            launches.close(tx, launch_id)

    def set_restored_from(self, launch_id: int, generation_key: str) -> None:
        with self._writing() as tx:
            launches.set_restored_from(tx, launch_id, generation_key)

    # -- the save, C1 to C5 --------------------------------------------------------------------
    def begin_save(
        self,
        launch_id: int,
        *,
        n: int,
        step: int,
        key: str,
        ranks: Sequence[int],
        deadline_seconds: float | None,
        fence: int,
        tags: Sequence[str] = (),
    ) -> SaveTicket:
        with self._writing() as tx:
            return saves.begin(
                tx,
                launch_id,
                n=n,
                step=step,
                key=key,
                ranks_expected=ranks,
                deadline_seconds=deadline_seconds,
                fence=fence,
                tags=tags,
            )

    def skip_save(self, launch_id: int, *, n: int, step: int, fence: int) -> None:
        with self._writing() as tx:
            saves.skip(tx, launch_id, n=n, step=step, fence=fence)

    def report_rank(
        self,
        generation_id: int,
        rank: int,
        *,
        state: RankState,
        part_name: str | None = None,
        part_digest: str | None = None,
        nbytes: int | None = None,
        stall_seconds: float | None = None,
        write_seconds: float | None = None,
        retries: int = 0,
        error: str | None = None,
    ) -> None:
        values = {
            "nbytes": nbytes,
            "stall_seconds": stall_seconds,
            "write_seconds": write_seconds,
            "retries": retries,
            "error": error,
        }
        with self._writing() as tx:
            saves.report_rank(
                tx, generation_id, rank, state=state, part_name=part_name, part_digest=part_digest, values=values
            )

    def ranks(self, generation_id: int) -> list[RankRecord]:
        with self._reading() as connection:
            return reading.ranks_of(connection, self._repository_id, generation_id)

    def mark_durable(self, generation_id: int, facts: DurableFacts, *, fence: int) -> GenerationRecord:
        with self._writing() as tx:
            return generations.mark_durable(tx, generation_id, facts, fence=fence)

    def commit(self, generation_id: int, *, fence: int) -> GenerationRecord:
        with self._writing() as tx:
            return generations.commit(tx, generation_id, fence=fence)

    def set_proven(self, generation_id: int) -> GenerationRecord:
        with self._writing() as tx:
            return generations.set_proven(tx, generation_id)

    def abort(
        self, generation_id: int, *, stage: str, rank: int | None, reason: str, fence: int | None
    ) -> GenerationRecord:
        with self._writing() as tx:
            return generations.abort(tx, generation_id, stage=stage, rank=rank, reason=reason, fence=fence)

    def adopt(self, generation_id: int, facts: AdoptFacts, *, fence: int) -> GenerationRecord:
        with self._writing() as tx:
            return generations.adopt(tx, generation_id, facts, fence=fence)

    # -- retention -----------------------------------------------------------------------------
    def retire(self, generation_id: int, *, fence: int | None = None) -> GenerationRecord:
        with self._writing() as tx:
            return retention.retire(tx, generation_id, fence=fence)

    def mark_swept(self, generation_id: int) -> GenerationRecord:
        with self._writing() as tx:
            return retention.mark_swept(tx, generation_id)

    def packs(self, generation_id: int) -> list[PackRecord]:
        with self._reading() as connection:
            return packs.of_generation(connection, self._repository_id, generation_id)

    def pack_users(self, generation_key: str, name: str) -> list[int]:
        with self._reading() as connection:
            return packs.users(connection, self._repository_id, generation_key, name)

    def tag(self, generation_id: int, name: str) -> None:
        with self._writing() as tx:
            retention.tag(tx, generation_id, name)

    def untag(self, generation_id: int, name: str) -> None:
        with self._writing() as tx:
            retention.untag(tx, generation_id, name)

    def pin(self, generation_id: int, *, reason: str) -> None:
        with self._writing() as tx:
            retention.pin(tx, generation_id, reason=reason)

    def unpin(self, generation_id: int) -> None:
        with self._writing() as tx:
            retention.unpin(tx, generation_id)

    def quarantine(self, generation_id: int, *, reason: str) -> None:
        with self._writing() as tx:
            retention.quarantine(tx, generation_id, reason=reason)

    # -- reading -------------------------------------------------------------------------------
    def generation(self, generation_id: int) -> GenerationRecord | None:
        with self._reading() as connection:
            return reading.one(connection, self._repository_id, table.c.id == generation_id)

    def generation_by_key(self, key: str) -> GenerationRecord | None:
        with self._reading() as connection:
            return reading.one(connection, self._repository_id, table.c.key == key)

    def generations(
        self, *, run: str | None = None, states: Sequence[State] | None = None, limit: int | None = None
    ) -> list[GenerationRecord]:
        with self._reading() as connection:
            return reading.listing(connection, self._repository_id, run=run, states=states, limit=limit)

    def latest(self, run: str) -> GenerationRecord | None:
        with self._reading() as connection:
            return reading.latest(connection, self._repository_id, run, reading.NOT_QUARANTINED)

    def unproven(self, run: str) -> list[GenerationRecord]:
        with self._reading() as connection:
            return reading.unproven(connection, self._repository_id, run)

    def committed_at_step(self, run: str, step: int) -> GenerationRecord | None:
        with self._reading() as connection:
            return reading.latest(connection, self._repository_id, run, table.c.step == step)

    def tagged(self, run: str, tag: str) -> GenerationRecord | None:
        with self._reading() as connection:
            return reading.tagged(connection, self._repository_id, run, tag)

    def open_reader(self, generation_id: int, *, host: str, pid: int, ttl_seconds: float) -> int:
        with self._writing() as tx:
            return readers.open_reader(tx, generation_id, host=host, pid=pid, ttl_seconds=ttl_seconds)

    def close_reader(self, reader_id: int) -> None:
        with self._writing() as tx:
            readers.close_reader(tx, reader_id)

    def events(
        self, *, run: str | None = None, generation_id: int | None = None, limit: int | None = None
    ) -> list[EventRecord]:
        with self._reading() as connection:
            return events.history(connection, self._repository_id, run=run, generation_id=generation_id, limit=limit)

    def note(self, run: str, *, generation_id: int | None, kind: str, detail: Mapping[str, Any]) -> None:
        with self._writing() as tx:
            runs.note(tx, run, generation_id=generation_id, kind=kind, detail=detail)

    def view(self, name: str, *, run: str | None = None) -> list[dict[str, Any]]:
        with self._reading() as connection:
            return reading.view(connection, self._repository, name, run)
