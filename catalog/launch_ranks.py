"""The processes of a launch: one for each rank, each known by host, boot, pid and start time."""

from __future__ import annotations

from typing import NamedTuple

from ckptfmt.catalog.free_text import as_kept
from ckptfmt.catalog.ownership import require_owner
from ckptfmt.catalog.queries import launches, runs
from ckptfmt.catalog.transaction import NOW, Transaction
from ckptfmt.errors import Conflict, InvalidInput, NotFound
from ckptfmt.ports.records import LaunchRecord, LaunchRequest

_PROCESS = "SELECT host, pid, boot_id, pid_started FROM launch_ranks WHERE launch_id = :launch AND rank = :rank"


class _Process(NamedTuple):
    host: str
    pid: int
    boot_id: str
    pid_started: str


def join(tx: Transaction, run_name: str, request: LaunchRequest, rank: int) -> LaunchRecord:
    """Take the place of ``rank`` in the launch (see the port).

    No lock and no event: thousands of ranks come at once, and each writes its own row.
    """
    request = as_kept(request)
    run = runs.by_name(tx.session, tx.repository_id, run_name)
    launch = None if run is None else launches.by_token(tx.session, tx.repository_id, run.id, request.token)
    # Once more: the launch may have been acquired in between, and raised the fence. A fence never goes down.
    run = run if launch is None else runs.by_name(tx.session, tx.repository_id, run_name)
    if run is None or launch is None:
        raise NotFound(
            f"the launch that rank {rank} wants to join has not begun in run {run_name!r}: wait for its coordinator",
            kind="launch_absent",
        )
    if request.world_size != launch.world_size or not 0 <= rank < launch.world_size:
        raise InvalidInput(
            f"rank {rank} of {request.world_size} does not fit launch {launch.id} of run {run_name!r}, which has "
            f"{launch.world_size} ranks: start all ranks with one world size"
        )
    if launch.closed_at is not None:
        raise Conflict(
            f"launch {launch.id} of run {run.name!r} ended before rank {rank} joined it: see what its coordinator, "
            f"host {launch.host}, pid {launch.pid}, reports, then start all ranks again, with a new launch token",
            kind="launch_over",
        )
    require_owner(run, launch)
    _require_one_host(tx, launch, request, rank)
    place(tx, launch.id, rank, request)
    return launch


def place(tx: Transaction, launch_id: int, rank: int, request: LaunchRequest) -> None:
    """Note who the rank is; ``Conflict`` of the kind ``rank_taken`` if it is another process."""
    wanted = _Process(request.host, request.pid, request.boot_id, request.pid_started)
    tx.insert_if_absent("launch_ranks", launch_id=launch_id, rank=rank, joined_at=NOW, **wanted._asdict())
    ((*found,),) = tx.session.rows(_PROCESS, launch=launch_id, rank=rank)
    standing = _Process(*found)
    if standing != wanted:
        raise Conflict(
            f"rank {rank} of launch {launch_id} is host {standing.host}, pid {standing.pid} already, this process is "
            f"host {wanted.host}, pid {wanted.pid}: give every process a rank of its own, and every start of the job a "
            "launch token of its own",
            kind="rank_taken",
        )


def _require_one_host(tx: Transaction, launch: LaunchRecord, request: LaunchRequest, rank: int) -> None:
    # The boot tells: containers of one host have names of their own, and share its kernel and its locks.
    boots = request.boot_id and launch.boot_id
    same = request.boot_id == launch.boot_id if boots else request.host == launch.host
    if tx.session.one_host and not same:
        raise Conflict(
            f"rank {rank} of launch {launch.id} is on host {request.host}, its coordinator on host {launch.host}, and "
            f"the catalog {tx.url} is a file, which is for one host: use a PostgreSQL catalog (catalog='postgresql://"
            "...' or CKPTFMT_CATALOG)",
            kind="one_host",
        )
