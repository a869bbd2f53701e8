"""``SqlCatalog``: the catalog of one repository in a SQL database, open for writing.

A thin front: it opens the transaction, translates database errors, and hands the work to the room of the noun.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ckptfmt.catalog import (
    generations,
    launch_ranks,
    launches,
    messages,
    rank_reports,
    readers,
    registration,
    replicas,
    restoring,
    retention,
    runs,
    saves,
    tiers,
)
from ckptfmt.catalog.failures import translated
from ckptfmt.catalog.reader import CatalogReader
from ckptfmt.catalog.transaction import Transaction
from ckptfmt.ports.records import (
    AdoptFacts,
    DurableFacts,
    GenerationRecord,
    LaunchRecord,
    LaunchRequest,
    RankReport,
    RankState,
    ReplicaPack,
    RunRecord,
    SaveTicket,
    TierRecord,
    TierRole,
)
from ckptfmt.ports.restoration import Restoration, RestoredRow


class SqlCatalog(CatalogReader):
    """Implements ``ckptfmt.ports.catalog.Catalog``. Safe to use from any thread."""

    read_only = False

    @contextmanager
    def _writing(self) -> Iterator[Transaction]:
        with translated(self._url), self._sessions.write() as session:
            yield Transaction(session, self._repository_id, self._url)

    def moved_to(self, url: str) -> None:
        with translated(self._url), self._sessions.write() as session:
            registration.register(session, self._repository, url)

    # -- runs and launches ---------------------------------------------------------------------
    def ensure_run(self, name: str, key: str) -> RunRecord:
        with self._writing() as tx:
            return runs.ensure(tx, name, key)

    def acquire_launch(
        self, run: str, request: LaunchRequest, *, lease_seconds: float, displace: int | None = None, rank: int = 0
    ) -> LaunchRecord:
        with self._writing() as tx:
            return launches.acquire(tx, run, request, lease_seconds=lease_seconds, displace=displace, rank=rank)

    def join_launch(self, run: str, request: LaunchRequest, *, rank: int) -> LaunchRecord:
        with self._writing() as tx:
            return launch_ranks.join(tx, run, request, rank)

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
        token: str,
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
                token=token,
                tags=tags,
            )

    def skip_save(self, launch_id: int, *, n: int, step: int, fence: int, token: str) -> None:
        with self._writing() as tx:
            saves.skip(tx, launch_id, n=n, step=step, fence=fence, token=token)

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
        staged_tier: str | None = None,
        staged_bytes: int | None = None,
        staged_seconds: float | None = None,
        replicated_bytes: int | None = None,
    ) -> None:
        report = RankReport(
            rank,
            state,
            part_name,
            part_digest,
            nbytes,
            stall_seconds,
            write_seconds,
            retries,
            error,
            staged_tier,
            staged_bytes,
            staged_seconds,
            replicated_bytes,
        )
        self.report_ranks(generation_id, [report])

    def report_ranks(self, generation_id: int, reports: Sequence[RankReport]) -> None:
        with self._writing() as tx:
            rank_reports.report(tx, generation_id, reports)

    def report_progress(self, generation_id: int, rank: int, replicated_bytes: int) -> None:
        with self._writing() as tx:
            rank_reports.progress(tx, generation_id, rank, replicated_bytes)

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

    def set_retention_hold(self, run: str, held: bool) -> RunRecord:
        with self._writing() as tx:
            return runs.set_retention_hold(tx, run, held)

    # -- messages of a launch ------------------------------------------------------------------
    def post(self, launch_id: int, topic: str, rank: int, body: Mapping[str, Any]) -> Mapping[str, Any]:
        with self._writing() as tx:
            return messages.post(tx, launch_id, topic, rank, body)

    def forget_posts(self, launch_id: int, topic: str) -> None:
        with self._writing() as tx:
            messages.forget(tx, launch_id, topic)

    # -- tiers ---------------------------------------------------------------------------------
    def ensure_tier(self, uuid: str, *, role: TierRole, url: str, host: str | None) -> TierRecord:
        with self._writing() as tx:
            return tiers.ensure(tx, uuid, role=role, url=url, host=host)

    def forget_tier(self, uuid: str) -> None:
        with self._writing() as tx:
            tiers.forget(tx, uuid)

    def note_replicas(self, generation_id: int, tier: str, packs: Sequence[ReplicaPack]) -> None:
        with self._writing() as tx:
            replicas.note(tx, generation_id, tier, packs)

    def mark_replicated(self, generation_id: int, tier: str) -> None:
        with self._writing() as tx:
            replicas.mark_whole(tx, generation_id, tier)

    def drop_replicas(self, generation_id: int, tier: str, *, packs: Sequence[str] | None = None) -> None:
        with self._writing() as tx:
            replicas.drop(tx, generation_id, tier, names=packs)

    # -- repair --------------------------------------------------------------------------------
    def restore(self, plan: Restoration) -> list[RestoredRow]:
        with self._writing() as tx:
            registration.register(tx.session, self._repository, plan.url)
            return restoring.restore(tx, plan)

    # -- readers and notes ----------------------------------------------------------------------
    def open_reader(self, generation_id: int, *, host: str, pid: int, ttl_seconds: float) -> int:
        with self._writing() as tx:
            return readers.open_reader(tx, generation_id, host=host, pid=pid, ttl_seconds=ttl_seconds)

    def close_reader(self, reader_id: int) -> None:
        with self._writing() as tx:
            readers.close_reader(tx, reader_id)

    def note(self, run: str, *, generation_id: int | None, kind: str, detail: Mapping[str, Any]) -> None:
        with self._writing() as tx:
            runs.note(tx, run, generation_id=generation_id, kind=kind, detail=detail)
