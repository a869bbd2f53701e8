"""What the engine asks of the SQL catalog (spec/catalog.md).

A ``Catalog`` speaks for one repository. Each method is one transaction. Timestamps are taken from
the database's clock and returned as aware UTC datetimes. ``fence`` is the caller's launch fence: the
transaction locks the run's row first and raises ``Fenced`` unless ``fence == runs.fence`` there.
Database failures are ``CatalogError``, with ``transient=True`` where nothing was established and
the same call may be repeated (every method here may be repeated safely), and with a kind of
``UNWRITABLE`` where the database may still be read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Protocol

from ckptfmt.format.states import State
from ckptfmt.ports.records import (
    AdoptFacts,
    CatalogIdentity,
    DurableFacts,
    EventRecord,
    GenerationRecord,
    LaunchRecord,
    LaunchRequest,
    PackRecord,
    RankRecord,
    RankReport,
    RankState,
    ReplicaPack,
    ReplicaRecord,
    RunRecord,
    SaveTicket,
    TierRecord,
    TierRole,
)

if TYPE_CHECKING:
    from ckptfmt.ports.restoration import Restoration, RestoredRow

UNWRITABLE: Final = frozenset({"catalog_full", "catalog_read_only", "catalog_files", "catalog_io"})
"""Kinds of ``CatalogError`` that say that nothing could be written: no room, no permission, no file descriptors, a
failing disk."""


DAMAGED: Final = "catalog_damaged"
"""Kind of ``CatalogError`` that says: the database is broken, or something of ours in it is missing."""

States = Mapping[str, tuple[State, int | None]]
"""State and ``commit_seq`` of generations, by key."""


class Catalog(Protocol):
    """The catalog of one repository."""

    @property
    def url(self) -> str:
        """For display: no password."""

    @property
    def read_only(self) -> bool: ...

    def identity(self) -> CatalogIdentity: ...

    def root_url(self) -> str:
        """Where the repository was last opened for writing."""

    def moved_to(self, url: str) -> None:
        """Note where the repository is opened for writing now."""

    # -- runs and launches ---------------------------------------------------------------------
    def ensure_run(self, name: str, key: str) -> RunRecord: ...

    def runs(self) -> list[RunRecord]:
        """Sorted by name."""

    def live_launch(self, run: str) -> LaunchRecord | None:
        """The launch that holds the run's lease now, by the database's clock."""

    def launches(self, run: str) -> list[LaunchRecord]:
        """Newest first."""

    def acquire_launch(
        self, run: str, request: LaunchRequest, *, lease_seconds: float, displace: int | None = None, rank: int = 0
    ) -> LaunchRecord:
        """Take the run's lease: raise ``runs.fence`` by one and insert the launch with it.

        ``rank`` is that of the calling process, which need not ``join_launch``. What older launches of the run posted
        is removed.

        ``Conflict`` of the kind ``launch_held`` (naming host, pid and age of the holder) while another launch is
        live, unless its id is ``displace``. A repeat with the same token by the same pid returns the first
        answer; a token used by anybody else, or closed, is ``Conflict``.
        """

    def join_launch(self, run: str, request: LaunchRequest, *, rank: int) -> LaunchRecord:
        """Take the place of ``rank`` in the launch that has the request's token. A repeat by the same process is fine.

        ``NotFound`` of the kind ``launch_absent`` until that launch has been acquired. ``Conflict`` of the kind
        ``rank_taken`` if another process is this rank, of the kind ``one_host`` if the database is a file and the
        process on another host than the launch's, of the kind ``launch_over`` if the launch was closed. ``Fenced`` if
        the launch's fence is no longer the run's.
        """

    def renew_lease(self, launch_id: int, *, lease_seconds: float, last_step: int | None = None) -> LaunchRecord:
        """Heartbeat. ``Fenced`` if the launch's fence is no longer the run's."""

    def close_launch(self, launch_id: int) -> None:
        """Release the lease. Idempotent."""

    def launch(self, launch_id: int) -> LaunchRecord:
        """``CatalogError`` if there is no such launch."""

    def last_committed_of(self, launch_id: int) -> GenerationRecord | None:
        """The newest generation that this launch has committed and that is committed still, by commit_seq."""

    def set_restored_from(self, launch_id: int, generation_key: str) -> None: ...

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
        """C1. Idempotent by (launch, n); another step for the same n is ``Conflict``.

        ``token`` is the launch's own: ``Fenced`` if the id and the fence belong to another launch by now, for a catalog
        that was put back from a copy hands both out again.

        ``tags`` are remembered and given to the generation by ``commit``.
        """

    def skip_save(self, launch_id: int, *, n: int, step: int, fence: int, token: str) -> None:
        """Record that save ``n`` was skipped because one was in flight."""

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
        """C2. The rank's own row; needs no lock.

        ``Conflict`` if the generation is no longer ``writing``, or a different part digest was reported before.
        """

    def report_ranks(self, generation_id: int, reports: Sequence[RankReport]) -> None:
        """C2 for many ranks at once: as ``report_rank`` for each, all of them or none."""

    def report_progress(self, generation_id: int, rank: int, replicated_bytes: int) -> None:
        """How many bytes of the rank's packs the durable tier holds by now; needs no lock, and is never lowered.

        Nothing happens if the rank is durable or failed already. ``Conflict`` of the kind ``not_writing`` if the
        generation is no longer ``writing``: the rank must stop.
        """

    def ranks(self, generation_id: int) -> list[RankRecord]: ...

    def mark_durable(self, generation_id: int, facts: DurableFacts, *, fence: int) -> GenerationRecord:
        """C3, ``writing -> durable``. Idempotent for equal facts.

        Needs every expected rank durable and every lower save of the launch terminal.
        """

    def commit(self, generation_id: int, *, fence: int) -> GenerationRecord:
        """C4, the commit point: ``durable -> committed`` with the next ``commit_seq`` of the run; moves the tags here.

        Idempotent. ``Conflict`` if it was aborted.
        """

    def set_proven(self, generation_id: int) -> GenerationRecord:
        """C5: COMMIT.json is durable. Idempotent."""

    def abort(
        self, generation_id: int, *, stage: str, rank: int | None, reason: str, fence: int | None
    ) -> GenerationRecord:
        """``writing|durable -> aborted``; already aborted is success with the first reason kept.

        Committed (or later) is ``Conflict``: look at the returned state before saying "aborted".
        ``fence=None`` is for a generation past its deadline: checked by the database's clock.
        """

    def adopt(self, generation_id: int, facts: AdoptFacts, *, fence: int) -> GenerationRecord:
        """Repair: ``aborted|writing|durable -> committed`` on the evidence of a committed verdict."""

    # -- messages of a launch ------------------------------------------------------------------
    def post(self, launch_id: int, topic: str, rank: int, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Leave a message, unless this rank has left one under this topic; return what stands there.

        ``body`` is plain JSON. ``Fenced`` if the launch's fence is no longer the run's.
        """

    def posts(self, launch_id: int, topic: str) -> dict[int, Mapping[str, Any]]:
        """The messages under a topic, by rank."""

    def forget_posts(self, launch_id: int, topic: str) -> None:
        """Remove the messages under a topic. Idempotent. ``Fenced`` as with ``post``."""

    # -- retention -----------------------------------------------------------------------------
    def retire(self, generation_id: int, *, fence: int | None = None) -> GenerationRecord:
        """``committed -> retired``. The rule is recomputed in this transaction: ``Conflict`` (saying which rule) for
        the newest proven generation of the run, a pinned or tagged one, one with a live reader, one that a live
        launch restored from, and anything in a run under ``retention_hold``."""

    def mark_swept(self, generation_id: int) -> GenerationRecord:
        """gc has removed the objects: ``retired|aborted -> deleted``; on ``deleted`` it only moves ``swept_at``."""

    def packs(self, generation_id: int) -> list[PackRecord]: ...

    def pack_users(self, generation_key: str, name: str) -> list[int]:
        """Ids of the generations, not deleted, that refer to this pack."""

    def database_now(self) -> datetime: ...

    def tag(self, generation_id: int, name: str) -> None:
        """Give a committed generation a tag; the name moves if another generation of the run had it."""

    def untag(self, generation_id: int, name: str) -> None:
        """``NotFound`` if this generation does not have the tag."""

    def pin(self, generation_id: int, *, reason: str) -> None: ...

    def unpin(self, generation_id: int) -> None: ...

    def quarantine(self, generation_id: int, *, reason: str) -> None:
        """Leave the generation out of ``latest``. A dated fact, not a state."""

    def set_retention_hold(self, run: str, held: bool) -> RunRecord:
        """Hold everything of a run, or let it go again: under a hold nothing is retired. Idempotent."""

    # -- tiers ---------------------------------------------------------------------------------
    def ensure_tier(self, uuid: str, *, role: TierRole, url: str, host: str | None) -> TierRecord:
        """Note a tier, and where it is now. Idempotent; a forgotten one is known again.

        ``Conflict`` of the kind ``tier_differs`` if it is known with another role or host.
        """

    def tiers(self) -> list[TierRecord]:
        """In the order in which they came; forgotten ones are left out."""

    def forget_tier(self, uuid: str) -> None:
        """The tier is gone for good: so are the rows of what it held, and its lag. Idempotent.

        ``NotFound`` if there never was one.
        """

    def note_replicas(self, generation_id: int, tier: str, packs: Sequence[ReplicaPack]) -> None:
        """The tier holds these packs of the generation, their bytes compared just now. A repeat moves name and time.

        From C3 on, for until then no pack is known: ``Conflict`` of the kind ``not_kept`` unless the generation is
        ``durable`` or ``committed``. ``NotFound`` for a pack to which the generation does not refer, or a tier that is
        not known.
        """

    def mark_replicated(self, generation_id: int, tier: str) -> None:
        """The tier holds the whole committed generation: all packs, which must have been noted, parts, manifest and
        COMMIT.json. Idempotent. ``Conflict`` of the kind ``replica_incomplete`` if a pack was not noted."""

    def drop_replicas(self, generation_id: int, tier: str, *, packs: Sequence[str] | None = None) -> None:
        """The tier no longer holds what lay in the generation's folder, or the packs of these names there: it is not
        whole there any more. Idempotent."""

    def replicas(self, generation_id: int) -> list[ReplicaRecord]:
        """Of the packs to which the generation refers, and of all that lie in its folder; by tier, owner and name."""

    def unreplicated(self, run: str, tier: str) -> list[GenerationRecord]:
        """Committed generations of the run, quarantined ones left out, that the tier does not hold whole; oldest commit
        first."""

    def bytes_held(self, run: str | None = None) -> int:
        """Bytes of the packs that generations refer to, or have in their folders, which are not ``deleted``; of
        generations without packs yet what their ranks have told, for a run or the whole repository.

        Admission that nobody can outrun: report the bytes to be written with ``report_rank(state="writing",
        nbytes=...)`` first, and ask then.
        """

    # -- repair --------------------------------------------------------------------------------
    def restore(self, plan: Restoration) -> list[RestoredRow]:
        """Put what storage proves into rows, lift every counter above what may have been handed out, set the retention
        hold of every run, and become the catalog of the new epoch. Rows that are there are never lowered.

        ``Conflict`` of the kind ``rebuilt_meanwhile`` unless this is the catalog that the plan was made for.
        """

    # -- reading -------------------------------------------------------------------------------
    def generation(self, generation_id: int) -> GenerationRecord | None: ...

    def generation_by_key(self, key: str) -> GenerationRecord | None: ...

    def states(self) -> States:
        """Of every generation of the repository."""

    def generations(
        self, *, run: str | None = None, states: Sequence[State] | None = None, limit: int | None = None
    ) -> list[GenerationRecord]:
        """Newest first, never by step or time: committed ones by (epoch, commit_seq), ahead of the others by id."""

    def latest(self, run: str) -> GenerationRecord | None:
        """Newest committed generation that is not quarantined, by (epoch, commit_seq)."""

    def unproven(self, run: str) -> list[GenerationRecord]:
        """Committed generations whose ``proven_at`` is not set: C5 is to be finished."""

    def committed_at_step(self, run: str, step: int) -> GenerationRecord | None:
        """Newest committed one of that step."""

    def tagged(self, run: str, tag: str) -> GenerationRecord | None: ...

    def open_reader(self, generation_id: int, *, host: str, pid: int, ttl_seconds: float) -> int:
        """Register a live reader of a committed generation and return the reader's id. Each call makes one: a reader
        whose answer was lost lapses by itself.

        The same transaction checks that it is committed still: ``NotCommitted`` otherwise.
        """

    def close_reader(self, reader_id: int) -> None: ...

    def events(
        self, *, run: str | None = None, generation_id: int | None = None, limit: int | None = None
    ) -> list[EventRecord]:
        """Oldest first."""

    def note(self, run: str, *, generation_id: int | None, kind: str, detail: Mapping[str, Any]) -> None:
        """Append an event that is no state change, e.g. a restore that fell back. A repeat is a second event."""

    def view(self, name: str, *, run: str | None = None) -> list[dict[str, Any]]:
        """Rows of a documented view (``spec/catalog.md``)."""

    def close(self) -> None: ...
