"""A connection that goes at any statement of any change: the call may be repeated, and its work is done once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from postgres_gate import AnswerGate, Way
from tcp_proxy import TcpProxy, tcp_proxy

from ckptfmt.catalog.open import open_catalog
from ckptfmt.catalog.postgres_failures import UNREACHABLE
from ckptfmt.errors import CatalogError, CkptError, Conflict, NotFound
from ckptfmt.format import layout
from ckptfmt.ports.records import CatalogIdentity, GenerationRecord, RankReport, ReplicaPack
from ckptfmt.ports.restoration import ProvenRun, Restoration
from ckptfmt.testing.catalog_faults import CATALOG_CHANGES
from ckptfmt.testing.catalogs import REPOSITORY, Job, MakeCatalog, RawSql, request

if TYPE_CHECKING:
    from postgres_rig import PostgresServer

Ask = Callable[[Any], Any]
"""Makes the call, of whichever catalog object it is given."""

_FOUND_DONE = {"untag": NotFound, "restore": Conflict}
"""What a repeat says that finds its work done: that the tag is gone, and that the catalog has been rebuilt."""
_APART = {
    "note": {"events fell_back"},
    "open_reader": {"readers"},
    "mark_swept": {"events sweep"},
    "restore": {"runs fence", "events rebuild"},
}
"""What is not the same: a note is noted twice; a reader whose answer was lost is left, and lapses; what was deleted is
swept once more; a
rebuild changes every run, of which there are more each time."""


def _begin(job: Job) -> Ask:
    given = {"step": 3, "key": job.key(0), "ranks": [0], "deadline_seconds": 60, "tags": ["t"]}
    return lambda it: it.begin_save(job.launch.id, n=0, fence=job.fence, token=job.launch.token, **given)


def _join(job: Job) -> Ask:
    other = request(pid=7, token=job.launch.token)
    return lambda it: it.join_launch(job.run, replace(other, world_size=2), rank=1)


def _acquire(job: Job) -> Ask:
    wanted = request(pid=300)
    return lambda it: it.acquire_launch(job.run, wanted, lease_seconds=60, displace=job.launch.id)


def _restore(job: Job) -> Ask:
    known = job.catalog.identity()
    new = CatalogIdentity(known.uuid, known.epoch + 1)
    plan = Restoration(known, new, "merge", "/ckpts", (ProvenRun(job.run, f"{job.run}-key", 0, 0),), 0)
    return lambda it: it.restore(plan)


def _close_reader(job: Job) -> Ask:
    reader = job.catalog.open_reader(job.proven().id, host="h", pid=1, ttl_seconds=60)
    return lambda it: it.close_reader(reader)


def _unpin(job: Job) -> Ask:
    generation = job.proven()
    job.catalog.pin(generation.id, reason="r")
    return lambda it: it.unpin(generation.id)


def _retire(job: Job) -> Ask:
    generation = job.proven()
    job.proven(1)
    return lambda it: it.retire(generation.id, fence=job.fence)


def _forget(job: Job) -> Ask:
    job.catalog.post(job.launch.id, "hello", 0, {})
    return lambda it: it.forget_posts(job.launch.id, "hello")


def _on(make: Callable[[Job], Any], ask: Callable[[Any, Job, Any], Any]) -> Callable[[Job], Ask]:
    """``ask`` of a generation that ``make`` brings that far."""

    def prepare(job: Job) -> Ask:
        generation = make(job)
        return lambda it: ask(it, job, generation)

    return prepare


def _tier(job: Job) -> str:
    """A tier of its own for each run."""
    return f"tier-{job.run}"


def _known_tier(job: Job) -> GenerationRecord:
    job.catalog.ensure_tier(_tier(job), role="replica", url="/copy", host=None)
    return job.proven()


def _packs(made: GenerationRecord) -> list[ReplicaPack]:
    name = layout.pack_name(0, 0)
    return [ReplicaPack(made.key, name, name)]


def _noted(job: Job) -> GenerationRecord:
    return job.noted(job.proven(), _tier(job))


def _replicated(job: Job) -> GenerationRecord:
    return job.replicated(job.proven(), _tier(job))


_WRITING, _WRITTEN, _DURABLE, _COMMITTED, _PROVEN, _ABORTED = (
    Job.begin,
    Job.written,
    Job.durable,
    Job.committed,
    Job.proven,
    Job.aborted,
)
_PREPARED: dict[str, Callable[[Job], Ask]] = {
    "ensure_run": lambda job: lambda it: it.ensure_run(f"{job.run}-new", f"{job.run}-new"),
    "moved_to": lambda job: lambda it: it.moved_to(f"/{job.run}"),
    "acquire_launch": _acquire,
    "join_launch": _join,
    "renew_lease": lambda job: lambda it: it.renew_lease(job.launch.id, lease_seconds=60, last_step=4),
    "close_launch": lambda job: lambda it: it.close_launch(job.launch.id),
    "set_restored_from": _on(_PROVEN, lambda it, job, made: it.set_restored_from(job.launch.id, made.key)),
    "begin_save": _begin,
    "skip_save": lambda job: (
        lambda it: it.skip_save(job.launch.id, n=0, step=3, fence=job.fence, token=job.launch.token)
    ),
    "report_rank": _on(_WRITING, lambda it, job, made: it.report_rank(made.id, 0, state="failed", error="full")),
    "report_ranks": _on(_WRITING, lambda it, job, made: it.report_ranks(made.id, [RankReport(0, "staged")])),
    "mark_durable": _on(_WRITTEN, lambda it, job, made: it.mark_durable(made.id, job.facts(made), fence=job.fence)),
    "commit": _on(_DURABLE, lambda it, job, made: it.commit(made.id, fence=job.fence)),
    "set_proven": _on(_COMMITTED, lambda it, job, made: it.set_proven(made.id)),
    "abort": _on(_DURABLE, lambda it, job, made: it.abort(made.id, stage="s", rank=0, reason="r", fence=job.fence)),
    "adopt": _on(_ABORTED, lambda it, job, made: it.adopt(made.id, job.verdict(made), fence=job.fence)),
    "retire": _retire,
    "mark_swept": _on(_ABORTED, lambda it, job, made: it.mark_swept(made.id)),
    "tag": _on(_PROVEN, lambda it, job, made: it.tag(made.id, "best")),
    "untag": _on(lambda job: job.proven(tags=["best"]), lambda it, job, made: it.untag(made.id, "best")),
    "pin": _on(_PROVEN, lambda it, job, made: it.pin(made.id, reason="r")),
    "unpin": _unpin,
    "quarantine": _on(_PROVEN, lambda it, job, made: it.quarantine(made.id, reason="r")),
    "set_retention_hold": lambda job: lambda it: it.set_retention_hold(job.run, True),
    "restore": _restore,
    "open_reader": _on(_PROVEN, lambda it, job, made: it.open_reader(made.id, host="h", pid=1, ttl_seconds=60)),
    "close_reader": _close_reader,
    "note": lambda job: lambda it: it.note(job.run, generation_id=None, kind="fell_back", detail={"from": 7}),
    "post": lambda job: lambda it: it.post(job.launch.id, "hello", 0, {"step": 7}),
    "forget_posts": _forget,
    "report_progress": _on(_WRITING, lambda it, job, made: it.report_progress(made.id, 0, 7)),
    "ensure_tier": lambda job: lambda it: it.ensure_tier(_tier(job), role="replica", url="/copy", host=None),
    "forget_tier": _on(_replicated, lambda it, job, made: it.forget_tier(_tier(job))),
    "note_replicas": _on(_known_tier, lambda it, job, made: it.note_replicas(made.id, _tier(job), _packs(made))),
    "mark_replicated": _on(_noted, lambda it, job, made: it.mark_replicated(made.id, _tier(job))),
    "drop_replicas": _on(_replicated, lambda it, job, made: it.drop_replicas(made.id, _tier(job))),
}


_TABLES = (
    *("runs", "launches", "launch_ranks", "saves", "ranks", "packs", "tags", "pins", "readers", "messages"),
    *("replicas", "replicated_generations"),
)
_GROUPS = (("generations", "state"), ("events", "kind"), ("ranks", "state"), ("saves", "outcome"), ("tiers", "role"))
_SUMS = (
    *(("runs", "fence"), ("runs", "next_commit_seq"), ("launches", "last_step"), ("launches", "closed_at IS NULL")),
    *(("ranks", "replicated_bytes"), ("tiers", "forgotten_at IS NULL")),
)
_COUNTS = " UNION ALL ".join(
    [f"SELECT '{table}', COUNT(*) FROM {table}" for table in _TABLES]
    + [f"SELECT '{table} ' || {by}, COUNT(*) FROM {table} GROUP BY {by}" for table, by in _GROUPS]
    + [f"SELECT '{table} {what}', COALESCE(SUM(CAST({what} AS INTEGER)), 0) FROM {table}" for table, what in _SUMS]
)


@pytest.fixture
def pg_database(pg_emptied: str) -> str:
    return pg_emptied


@pytest.fixture
def proxy(postgres: PostgresServer) -> Iterator[TcpProxy]:
    with tcp_proxy(postgres.port) as running:
        yield running


def _error_of(ask: Ask, catalog: Any) -> CkptError | None:
    try:
        ask(catalog)
    except CkptError as error:
        return error
    return None


class _Trial:
    """One kind of call, again and again in runs of their own: past the proxy to compare with, and through it."""

    def __init__(self, catalog: Any, proxied: Any, proxy: TcpProxy, raw: RawSql, method: str) -> None:
        self.catalog, self.proxied, self.proxy, self.raw, self.method = catalog, proxied, proxy, raw, method
        self._runs = 0

    def _ready(self) -> Ask:
        self._runs += 1
        world_size = 2 if self.method == "join_launch" else 1
        return _PREPARED[self.method](Job.start(self.catalog, f"run-{self._runs}", world_size=world_size))

    def change(self, call: Callable[[], Any]) -> dict[str, int]:
        """How many rows, and how many of which state or kind, the call has added."""
        before = self._count()
        call()
        return {
            name: count - before.get(name, 0) for name, count in self._count().items() if count != before.get(name, 0)
        }

    def _count(self) -> dict[str, int]:
        return dict(self.raw(_COUNTS, {}))

    def uncut(self) -> tuple[dict[str, int], int]:
        """What the call changes, and in how many requests."""
        ask = self._ready()
        self.proxy.gate = gate = AnswerGate()
        changed = self.change(lambda: ask(self.proxied))
        return changed, gate.answered

    def cut(self, at: int, way: Way) -> tuple[dict[str, int], int]:
        """What the call changes that is cut and then repeated, and how often it was cut."""
        ask = self._ready()
        self.proxy.gate = gate = AnswerGate(at, way)
        return self.change(lambda: self._repeated(ask)), gate.cuts

    def _repeated(self, ask: Ask) -> None:
        told = _error_of(ask, self.proxied)
        if told is None:
            return  # it was cut where nothing had been begun, and the library tried again by itself
        assert isinstance(told, CatalogError)
        assert (told.kind, told.transient) == (UNREACHABLE, True)
        assert "nothing is established" in str(told)
        again = _error_of(ask, self.proxied)
        assert again is None or isinstance(again, _FOUND_DONE.get(self.method, ()))


@pytest.mark.parametrize("everywhere", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", sorted(_PREPARED))
def test_a_connection_cut_at_any_statement(
    method: str,
    everywhere: bool,
    pg_make_catalog: MakeCatalog,
    pg_raw: RawSql,
    postgres: PostgresServer,
    pg_database: str,
    proxy: TcpProxy,
) -> None:
    url = postgres.url(pg_database, port=proxy.port)
    proxied = open_catalog(url, repository=REPOSITORY, display_url="/ckpts", mode="w", create=False)
    trial = _Trial(pg_make_catalog(), proxied, proxy, pg_raw, method)
    wanted, requests = trial.uncut()
    assert requests >= 3, "begin, at least one statement, commit"
    # The last is COMMIT: of all answers the one whose loss leaves everything open.
    ways: tuple[Way, ...] = ("before", "after")
    points = [(at, way) for at in range(requests) for way in ways] if everywhere else [(requests - 1, "after")]
    for at, way in points:
        changed, cuts = trial.cut(at, way)
        assert cuts == 1, (at, way)
        apart = {name for name in wanted | changed if wanted.get(name) != changed.get(name)}
        assert apart <= _APART.get(method, set()), (at, way, wanted, changed)


def test_every_change_of_the_port_was_cut() -> None:
    assert set(_PREPARED) == CATALOG_CHANGES
