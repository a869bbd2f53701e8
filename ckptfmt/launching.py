"""Beginning a launch: lease, fence, and the older launch's rows settled before anything is restored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from ckptfmt import connect, reading
from ckptfmt.checkpointer import Checkpointer
from ckptfmt.engine.families import Families
from ckptfmt.engine.keep.recover import prove_committed, settle_older
from ckptfmt.engine.leases import Lease
from ckptfmt.engine.save.context import LaunchContext, Ranks, ReplicaCheck
from ckptfmt.engine.save.meeting import Invitation, Meeting, Place, convene, leave
from ckptfmt.engine.save.spreader import Spreader
from ckptfmt.engine.save.stage_keeper import StageKeeper
from ckptfmt.engine.save.staging import Stager
from ckptfmt.engine.site import Site
from ckptfmt.errors import CatalogError, InvalidInput
from ckptfmt.format import layout
from ckptfmt.joint_restore import JointRestoring
from ckptfmt.policy import Decisions, JointDecisions, Modes, OwnDecisions, PreemptionFlag, SavePolicy
from ckptfmt.ports.catalog import UNWRITABLE
from ckptfmt.ports.records import RunRecord
from ckptfmt.rank_here import rank_here
from ckptfmt.restoring import Restoring


@dataclass(frozen=True)
class LaunchOrder:
    """What ``Repository.checkpointer`` was asked for. ``commit_timeout`` is in seconds."""

    policy: SavePolicy
    modes: Modes
    signals: tuple[int, ...]
    commit_timeout: float
    token: str | None
    takeover: bool
    ranks: Ranks
    place: Place

    @property
    def beat_seconds(self) -> float:
        """How often the launch's heartbeat looks whether the lease is to be renewed, and a save is overdue."""
        return min(5.0, max(0.05, self.commit_timeout / 4))


def ranks_of(
    rank: int | None, world_size: int | None, members: Sequence[int] | None, replica_check: ReplicaCheck
) -> Ranks:
    """Which rank this process is: as it is told, else as its surroundings tell."""
    if rank is None or world_size is None:
        if (rank, world_size) not in ((None, None), (None, 1)):
            raise InvalidInput(f"rank={rank!r} with world_size={world_size!r}: give both, or neither")
        rank, world_size = (0, 1) if world_size == 1 else rank_here()
    return Ranks(rank, world_size, tuple(range(world_size) if members is None else sorted(members)), replica_check)


def begin_launch(
    connection: connect.Connection, run: str, order: LaunchOrder, *, families: Callable[[], Families] | None = None
) -> Checkpointer:
    """Take the run's lease, or join the launch that has it, and return this rank's checkpointer. ``families`` are those
    of what it will save: of what is live in this process, unless given."""
    if not order.commit_timeout > 0:
        raise InvalidInput(f"commit_timeout={order.commit_timeout!r}: give a positive number of seconds")
    try:
        return _begin(connection, run, order, families or connect.live_families)
    except CatalogError as error:
        if error.kind not in UNWRITABLE:
            raise
        raise CatalogError(
            f"run {run!r}: no launch can begin, since it takes the run's lease in the catalog: {error}; what is "
            f'committed can be read all the same: ckptfmt.restore(state, "{connection.url}", run={run!r}), or '
            'open(..., mode="r")',
            kind=error.kind,
            transient=error.transient,
        ) from error


def _begin(
    connection: connect.Connection, run: str, order: LaunchOrder, families: Callable[[], Families]
) -> Checkpointer:
    site, ranks = connection.site, order.ranks
    catalog = site.sql()
    record = catalog.ensure_run(run, layout.run_key(run))

    def settle(lease: Lease) -> None:
        settle_older(site, run, lease)
        prove_committed(site, run, dry_run=False)

    meeting = convene(
        catalog,
        Invitation(record, site.repository, ranks, order.token, order.takeover, order.place, order.beat_seconds),
        partial(connect.store_board, world_size=ranks.world_size),
        settle=settle,
    )
    with ExitStack() as begun:  # nothing of it goes on where the rest fails
        begun.callback(meeting.lease.close)
        flag = PreemptionFlag(order.signals)
        begun.callback(flag.close)
        context = LaunchContext(
            site=site,
            run=record,
            launch=meeting.lease.launch,
            ranks=ranks,
            coordination=meeting.coordination,
            commit_timeout=order.commit_timeout,
            stager=_stager(site, record, ranks),
            spreader=_spreader(site, order, meeting),
            bytes_max=order.modes.bytes_max,
        )
        decisions = _decisions(order, flag, meeting)
        begun.callback(decisions.close)
        made = Checkpointer(
            context,
            lease=meeting.lease,
            on_busy=order.policy.on_busy,
            modes=order.modes,
            decisions=decisions,
            families=families,
            open_row=partial(reading.open_record, connection),
            restoring=_restoring(connection, context, meeting),
            leave=partial(leave, meeting, ranks),
        )
        begun.pop_all()
    return made


def _stager(site: Site, run: RunRecord, ranks: Ranks) -> Stager | None:
    """The stage of this rank, freed of what older launches left."""
    tier = site.tiers.stage
    if tier is None or not ranks.saves:
        return None
    keeper = StageKeeper(tier, site.sql(), run.key, ranks.rank)
    keeper.clean()
    return Stager(tier, keeper, site.sql(), ranks.rank)


def _spreader(site: Site, order: LaunchOrder, meeting: Meeting) -> Spreader | None:
    if not site.tiers.replicas:
        return None
    return Spreader(site, order.ranks, meeting.board, patience=order.commit_timeout)


def _decisions(order: LaunchOrder, flag: PreemptionFlag, meeting: Meeting) -> Decisions:
    if meeting.board is None:
        return OwnDecisions(order.policy, flag)
    return JointDecisions(order.policy, flag, meeting.board, order.ranks)


def _restoring(connection: connect.Connection, context: LaunchContext, meeting: Meeting) -> Restoring:
    open_row = partial(reading.open_record, connection)
    open_at = partial(reading.find, connection, context.run.name)
    if meeting.board is None:
        return Restoring(context, open_row=open_row, open_at=open_at)
    unguarded = partial(reading.open_unguarded, connection)
    return JointRestoring(context, meeting.board, open_row=open_row, open_at=open_at, open_unguarded=unguarded)
