"""How the ranks of one start of a job come together: one identity, one lease, one place to meet."""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal

from ckptfmt.engine.leases import Lease
from ckptfmt.engine.save.alone import Alone
from ckptfmt.engine.save.boards import CatalogBoard, PatientBoard, await_posts, post_within
from ckptfmt.engine.save.context import Ranks
from ckptfmt.engine.save.launch import JOIN_SECONDS, acquire, join, launch_token
from ckptfmt.engine.save.messages import Messages
from ckptfmt.engine.save.outcome import tell
from ckptfmt.engine.save.rows import Rows
from ckptfmt.errors import CatalogError, CkptError, InvalidInput
from ckptfmt.format import layout
from ckptfmt.ports.catalog import Catalog
from ckptfmt.ports.coordination import COMMON, Board, Body, Coordination
from ckptfmt.ports.records import LaunchRecord, RunRecord

log = logging.getLogger("ckptfmt")

Place = Literal["auto", "catalog", "c10d"]
Stores = Callable[[str], Board | None]
"""A board under a prefix in the process group's store; None where there is none for this world."""

RANKS_IN_CATALOG_MAX: Final = 64
"""More of them ask one database too much."""
_SETTLE_SECONDS: Final = 600.0
"""How long the others wait while the coordinator settles what an older launch left."""
_READY: Final = "launch/ready"
_LEFT: Final = "launch/left"
LEAVE_SECONDS = 10.0
"""How long a coordinator that is done waits for the others."""
_starts: Counter[str] = Counter()
"""Launches of this process whose token came through a store, by run: every rank counts alike."""


@dataclass(frozen=True)
class Meeting:
    """A launch with its heartbeat, and where its ranks meet. ``board`` is None at world size 1."""

    lease: Lease
    coordination: Coordination
    board: Board | None


@dataclass(frozen=True)
class Invitation:
    """What every rank was told of the launch that is to begin. ``token`` None: it is agreed on. ``beat_seconds``: from
    one beat of its lease to the next."""

    run: RunRecord
    repository: str
    ranks: Ranks
    token: str | None
    takeover: bool
    place: Place
    beat_seconds: float


Settle = Callable[[Lease], object]


def convene(catalog: Catalog, invitation: Invitation, stores: Stores, *, settle: Settle) -> Meeting:
    """Begin the launch, or join it. On return everything that an older launch left is settled, and the lease is the
    caller's to close.

    ``settle`` does that, on the coordinator alone. Each wait for another rank is bounded, and names it.
    """
    ranks, run = invitation.ranks, invitation.run.name
    if invitation.place not in ("auto", "catalog", "c10d"):
        raise InvalidInput(f'coordination={invitation.place!r}: give "auto", "catalog" or "c10d"')
    if ranks.world_size == 1:
        token = launch_token(invitation.token, ranks)
        held = acquire(catalog, run, token=token, takeover=invitation.takeover)
        with _kept(catalog, held, invitation) as lease:
            settle(lease)
        return Meeting(lease, Alone(catalog, held), None)
    token = invitation.token or _agreed_token(invitation, stores)
    layout.validate_launch_token(token)
    store = _store(invitation, stores, token)
    if ranks.is_coordinator:
        held = _acquired(catalog, invitation, token, store)
    else:
        held = join(
            catalog,
            run,
            token=token,
            ranks=ranks,
            wait_seconds=JOIN_SECONDS,
            meanwhile=lambda: _require_no_fault(run, ranks, {} if store is None else store.peek(_READY, [COMMON])),
        )
    board = store or CatalogBoard(catalog, held.id, world_size=ranks.world_size)
    with _kept(catalog, held, invitation) as lease:
        if ranks.is_coordinator:
            _open(lease, board, settle)
        else:
            _await_opening(run, board, ranks)
    kind = Rows if store is None else Messages
    return Meeting(lease, kind(catalog, held, ranks, board), board)


@contextmanager
def _kept(catalog: Catalog, held: LaunchRecord, invitation: Invitation) -> Iterator[Lease]:
    """From here on the launch is kept alive, unless the block fails: settling may take longer than a lease."""
    lease = Lease(catalog, held, beat_seconds=invitation.beat_seconds, holds=invitation.ranks.is_coordinator)
    try:
        yield lease
    except BaseException:
        lease.close()
        raise


def _agreed_token(invitation: Invitation, stores: Stores) -> str:
    """A random one that the coordinator leaves in the process group's store. No collective."""
    ranks, run = invitation.ranks, invitation.run
    name = f"{invitation.repository}/{run.key}"
    store = stores(f"launches/{name}")
    if store is None:
        return launch_token(None, ranks)  # says what is missing
    board = PatientBoard(store)
    topic = f"token/{_starts[name]}"
    _starts[name] += 1
    until = time.monotonic() + JOIN_SECONDS
    if ranks.is_coordinator:
        return str(post_within(board, topic, COMMON, {"token": secrets.token_hex(16)}, until=until)["token"])
    found = await_posts(board, topic, [COMMON], until=until)
    if found is None:
        raise CatalogError(
            f"run {run.name!r}: rank {ranks.coordinator}, the coordinator, has left no launch token within "
            f"{JOIN_SECONDS:g} s: every rank has to call checkpointer() for the run, as often as the others",
            kind="launch_absent",
        )
    return str(found[COMMON]["token"])


def _store(invitation: Invitation, stores: Stores, token: str) -> Board | None:
    """The board of the launch in the process group's store, unless the ranks are to meet in the catalog."""
    if invitation.place != "catalog":
        store = stores(layout.launch_digest(token))
        if store is not None:
            return PatientBoard(store)
        if invitation.place == "c10d":
            raise InvalidInput(
                'coordination="c10d" needs torch.distributed, initialised with the same world size: call '
                'init_process_group first, or use coordination="catalog"'
            )
    if invitation.ranks.world_size > RANKS_IN_CATALOG_MAX and invitation.ranks.is_coordinator:
        log.warning(
            "run %r: %d ranks meet in the catalog, each with questions of its own: initialise torch.distributed, use "
            'coordination="c10d", where one rank asks for all',
            invitation.run.name,
            invitation.ranks.world_size,
        )
    return None


def _acquired(catalog: Catalog, invitation: Invitation, token: str, store: Board | None) -> LaunchRecord:
    try:
        return acquire(catalog, invitation.run.name, token=token, takeover=invitation.takeover, ranks=invitation.ranks)
    except BaseException as error:
        if store is not None:  # without it the others have no place yet in which they could be told
            fault = f"{type(error).__name__}: {error}"
            tell("why no launch begins", lambda: store.post(_READY, COMMON, {"fault": fault}))
        raise


def _open(lease: Lease, board: Board, settle: Settle) -> None:
    """Settle, and let the others in, or tell them why not."""
    try:
        settle(lease)
        post_within(board, _READY, COMMON, {"fault": None}, until=time.monotonic() + JOIN_SECONDS)
    except BaseException as error:
        fault = f"{type(error).__name__}: {error}"
        tell("why the launch fails", lambda: board.post(_READY, COMMON, {"fault": fault}))
        raise


def _await_opening(run: str, board: Board, ranks: Ranks) -> None:
    found = await_posts(board, _READY, [COMMON], until=time.monotonic() + _SETTLE_SECONDS)
    if found is None:
        raise CatalogError(
            f"run {run!r}: rank {ranks.coordinator}, the coordinator, has not settled what older launches left within "
            f"{_SETTLE_SECONDS:g} s: see what it reports",
            kind="launch_absent",
        )
    _require_no_fault(run, ranks, found)


def _require_no_fault(run: str, ranks: Ranks, found: Mapping[int, Body]) -> None:
    fault = found[COMMON]["fault"] if found else None
    if fault is not None:
        raise CatalogError(
            f"run {run!r}: rank {ranks.coordinator}, the coordinator, could not begin the launch: {fault}",
            kind="launch_failed",
        )


def leave(meeting: Meeting, ranks: Ranks) -> None:
    """This rank is done. The coordinator stays a little for the others: it has the lease, and perhaps the store."""
    board = meeting.board
    if board is None:
        return
    if not ranks.is_coordinator:
        tell("that this rank is done", lambda: board.post(_LEFT, ranks.rank, {}))
        return
    others = [rank for rank in ranks.every if rank != ranks.rank]
    try:
        if await_posts(board, _LEFT, others, until=time.monotonic() + LEAVE_SECONDS) is None:
            log.info("the launch ends while other ranks may still be at work")
    except CkptError as error:  # fenced, or without a board: nobody can say anything any more
        log.info("the launch ends unheard by the other ranks: %s", error)
