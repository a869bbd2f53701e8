"""The thin front of a repository: it holds the parts and hands the work on."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ckptfmt import connect, exits, overview, reading
from ckptfmt.engine.keep import gc, recover
from ckptfmt.engine.reports import GcReport, GenerationInfo, RecoverReport, RunInfo
from ckptfmt.engine.save.launch import acquire
from ckptfmt.errors import InvalidInput
from ckptfmt.generation import Generation
from ckptfmt.policy import BusyRule, Freeze, Modes, SavePolicy
from ckptfmt.reference import At
from ckptfmt.tiering import NO_TIERS, TierOrder, with_tiers

if TYPE_CHECKING:
    from ckptfmt.checkpointer import Checkpointer
    from ckptfmt.engine.save.context import ReplicaCheck
    from ckptfmt.engine.save.meeting import Place
    from ckptfmt.ports.records import LaunchRecord


class Repository:
    """A repository: one catalog and one durable tier. A context manager; made by ``ckptfmt.open``."""

    def __init__(
        self, connection: connect.Connection, mode: connect.Mode, *, run: str | None = None, at: At = None
    ) -> None:
        self._connection = connection
        self._mode = mode
        self._checkpointers: weakref.WeakSet[Checkpointer] = weakref.WeakSet()
        self._run = run
        self._at = at

    @property
    def url(self) -> str:
        return self._connection.url

    @property
    def mode(self) -> connect.Mode:
        return self._mode

    def checkpointer(
        self,
        run: str | None = None,
        *,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        preempt_signals: Sequence[int] = (),
        on_busy: BusyRule = "wait",
        in_flight_max: int = 1,
        host_bytes_max: int | None = None,
        commit_timeout: float = 600.0,
        rank: int | None = None,
        world_size: int | None = None,
        ranks: Sequence[int] | None = None,
        launch: str | None = None,
        takeover: bool = False,
        freeze: Freeze = "now",
        replica_check: ReplicaCheck = "full",
        coordination: Place = "auto",
        bytes_max: int | None = None,
    ) -> Checkpointer:
        """Begin a launch of ``run`` (default "default"): take its lease, settle what an older launch left.

        ``in_flight_max=2`` lets a save begin while the one before is still being written: two snapshots in host memory.
        ``host_bytes_max`` bounds that memory, in all: of a state that does not fit ``save`` copies one piece after the
        other as earlier ones are written, and a restore that does not fit fills live tensors as it reads, not all or
        nothing. With ``freeze="deferred"`` ``save`` returns while what torch optimizers own is still being copied, and
        their next ``step`` waits for it; see ``PendingSave.before_update``.
        ``Conflict`` names a live holder; ``takeover=True`` fences it. ``bytes_max`` bounds the bytes of the run's
        generations, as that of ``open`` does of all.

        With several ranks each calls it, with the same arguments; the lowest one that saves leads. ``rank`` and
        ``world_size`` default to those of torch.distributed, else of the environment; ``ranks`` are those that save
        (default all), the others only restore and decide with them. ``launch`` is one token for all ranks of this
        start, needed where torch.distributed is not initialised. ``replica_check="off"`` compares no replicas.
        They meet in torch.distributed's store (``coordination="c10d"``) or the "catalog".
        """
        from ckptfmt.launching import LaunchOrder, begin_launch, ranks_of

        self._check_writable("saving")
        policy = SavePolicy(every_steps=every_steps, every_seconds=every_seconds, on_busy=on_busy)
        modes = Modes(in_flight_max, host_bytes_max, freeze, bytes_max)
        who = ranks_of(rank, world_size, ranks, replica_check)
        order = LaunchOrder(policy, modes, tuple(preempt_signals), commit_timeout, launch, takeover, who, coordination)
        self._checkpointers.add(made := begin_launch(self._connection, run or self._run or "default", order))
        return made

    def runs(self) -> list[RunInfo]:
        """All runs, sorted by name."""
        return overview.runs(self._connection.site)

    def generations(
        self, *, run: str | None = None, state: str | None = "committed", limit: int | None = None
    ) -> list[GenerationInfo]:
        """Generations, newest commit first; ``state=None`` gives all states."""
        return overview.generations(self._connection.site, run=run or self._run, state=state, limit=limit)

    def latest(self, run: str | None = None) -> Generation:
        """The latest committed generation. ``NotFound``, or ``NotCommitted`` if there are only others."""
        return reading.find(self._connection, run or self._run, None if run else self._at)

    def generation(self, id: int) -> Generation:
        """A committed generation by id. ``NotFound``, ``NotCommitted``."""
        return reading.find(self._connection, self._run, id)

    def tag(self, id: int, name: str) -> None:
        """Give a committed generation a tag; it moves if another generation of the run had it."""
        self._check_writable("tagging")
        self._connection.site.sql().tag(id, name)

    def untag(self, id: int, name: str) -> None:
        """Take a tag away. ``NotFound`` if the generation does not have it."""
        self._check_writable("untagging")
        self._connection.site.sql().untag(id, name)

    def recover(self, run: str | None = None, *, dry_run: bool = False) -> RecoverReport:
        """Finish, adopt or abort what a crash left. Idempotent; a run that a live launch holds is left alone."""
        self._check_writable("recover")
        return recover.recover(self._connection.site, run or self._run, dry_run=dry_run, acquire=self._acquire)

    def gc(self, *, dry_run: bool = True) -> GcReport:
        """Remove what aborted and retired generations left; with ``dry_run`` only list it."""
        self._check_writable("gc")
        return gc.collect(self._connection.site, dry_run=dry_run)

    def close(self) -> None:
        """Drain its checkpointers, then close connections. Open generations stay readable."""
        try:
            for checkpointer in tuple(self._checkpointers):
                checkpointer.close()
        finally:
            self._connection.close()

    def _check_writable(self, what: str) -> None:
        if self._connection.site.read_only or self._connection.site.catalog is None:
            raise InvalidInput(f'{self.url} is open for reading only; {what} needs ckptfmt.open(url, mode="w")')

    def _acquire(self, run: str, token: str) -> LaunchRecord:
        return acquire(self._connection.site.sql(), run, token=token, takeover=False, kind="recover", wait=False)

    def __enter__(self) -> Repository:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with exits.body_first(error):
            self.close()

    def __repr__(self) -> str:
        return f"<Repository {self.url} ({self._mode})>"


def open_repository(
    url: str | os.PathLike[str],
    *,
    mode: connect.Mode,
    run: str | None,
    at: At,
    catalog: str | None,
    storage_options: Mapping[str, Any] | None,
    tiers: TierOrder = NO_TIERS,
) -> Repository:
    connection = connect.open_site(url, mode=mode, catalog=catalog, storage_options=storage_options)
    return Repository(with_tiers(connection, tiers), mode, run=run, at=at)
