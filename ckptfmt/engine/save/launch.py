"""One launch of a run: its token, and how its ranks take the run's lease or join whoever has it."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable

from ckptfmt.engine import process, protocol
from ckptfmt.engine.leases import LEASE_SECONDS
from ckptfmt.engine.save.boards import Looks
from ckptfmt.engine.save.context import ALONE, Ranks
from ckptfmt.errors import CatalogError, Conflict, InvalidInput, NotFound
from ckptfmt.format import layout
from ckptfmt.ports.catalog import Catalog
from ckptfmt.ports.records import LaunchRecord, LaunchRequest

log = logging.getLogger("ckptfmt")

JOIN_SECONDS = 4 * LEASE_SECONDS
"""How long a rank waits for its coordinator, which may wait for the lease of a dead job itself."""
_POLL_SECONDS = 0.25
_ANSWER_SECONDS = 10.0


def launch_token(given: str | None, ranks: Ranks) -> str:
    """The launch's identity: explicit, else random.

    Never from a clock, and never from the environment, which a requeued job keeps (a launcher's run id may be the
    same for all jobs).
    """
    if given is not None:
        layout.validate_launch_token(given)
        return given
    if ranks.world_size > 1:
        raise InvalidInput(
            f"WORLD_SIZE={ranks.world_size} (told by arguments or surroundings) but no launch token: initialise "
            "torch.distributed first, or pass checkpointer(launch=...) with one token for all ranks of this start "
            "and a new one for each start"
        )
    return secrets.token_hex(16)


def acquire(
    catalog: Catalog,
    run: str,
    *,
    token: str,
    takeover: bool,
    ranks: Ranks = ALONE,
    kind: str = "training",
    lease_seconds: float = LEASE_SECONDS,
    wait: bool = True,
) -> LaunchRecord:
    """Take the run's lease, waiting for a dead holder's to lapse.

    A holder on this host whose process is gone counts as lapsed at once; ``takeover`` displaces any. A holder that
    renews its lease while we wait is alive: ``Conflict`` names it. One that does not for as long as a lease is gone,
    also where the database's clock went back and would give it more.
    """
    request = _request(token, kind, ranks)
    holder = catalog.live_launch(run)
    if holder is not None and holder.token == token:  # before our first request this is nobody's lost answer
        raise Conflict(
            f"the launch token of run {run!r} is in use by {holder.host}:{holder.pid} (launch {holder.id}): every "
            "start of a job needs a token of its own",
            kind="launch_token",
        )
    first_seen: LaunchRecord | None = None
    silent_from = 0.0
    while True:
        silent = first_seen is not None and time.monotonic() - silent_from > lease_seconds
        displace = holder.id if holder is not None and (takeover or silent or process.is_gone(holder)) else None
        try:
            return _ask(catalog, run, request, lease_seconds, displace, ranks.rank)
        except Conflict as error:
            holder = catalog.live_launch(run)
            if error.kind != "launch_held" or (holder is not None and _is_self(holder, request)):
                raise  # waiting would not help: the token is used up, or the holder is this process
            if holder is None:
                continue  # it lapsed or closed in between
            renewed = first_seen is not None and (
                holder.id != first_seen.id or holder.lease_until != first_seen.lease_until
            )
            if not wait or renewed:
                raise Conflict(
                    f"run {run!r} is held by {holder.host}:{holder.pid} (launch {holder.id}, lease until "
                    f"{holder.lease_until:%H:%M:%S} UTC): stop that job, or pass takeover=True to fence it",
                    kind="launch_held",
                ) from None
            if first_seen is None:
                first_seen, silent_from = holder, time.monotonic()
                log.warning(
                    "run %r is held by %s:%d; waiting for its lease to lapse (at most %.0f s)",
                    run,
                    holder.host,
                    holder.pid,
                    lease_seconds,
                )
            time.sleep(_POLL_SECONDS)


def _request(token: str, kind: str, ranks: Ranks) -> LaunchRequest:
    """This process, as who asks for the lease."""
    return LaunchRequest(
        token=token,
        host=process.host_name(),
        pid=os.getpid(),
        boot_id=process.boot_id(),
        pid_started=process.pid_started(os.getpid()),
        world_size=ranks.world_size,
        kind="recover" if kind == "recover" else "training",
    )


def _ask(
    catalog: Catalog, run: str, request: LaunchRequest, lease_seconds: float, displace: int | None, rank: int
) -> LaunchRecord:
    """Ask again where the answer was lost: else the lease would be held by nobody who knows of it."""
    return protocol.repeat(
        lambda: catalog.acquire_launch(run, request, lease_seconds=lease_seconds, displace=displace, rank=rank),
        until=time.monotonic() + _ANSWER_SECONDS,
    )


def join(
    catalog: Catalog,
    run: str,
    *,
    token: str,
    ranks: Ranks,
    wait_seconds: float,
    meanwhile: Callable[[], None] = lambda: None,
) -> LaunchRecord:
    """Take this rank's place in the launch that the coordinator acquires, waiting until it has.

    ``Conflict`` if another process is this rank, or the catalog is for one host and this is another one;
    ``CatalogError`` if the coordinator does not come, or what ``meanwhile`` raises.
    """
    request = _request(token, "training", ranks)
    until, looks = time.monotonic() + wait_seconds, Looks(_POLL_SECONDS)
    while True:
        try:
            return protocol.repeat(lambda: catalog.join_launch(run, request, rank=ranks.rank), until=until)
        except NotFound as absent:
            if absent.kind != "launch_absent":
                raise
            if time.monotonic() > until:
                raise CatalogError(
                    f"run {run!r}: rank {ranks.coordinator}, the coordinator, has not begun the launch within "
                    f"{wait_seconds:g} s: see what it reports (it may be waiting for the lease of another job)",
                    kind="launch_absent",
                ) from absent
        meanwhile()
        looks.rest()


def _is_self(holder: LaunchRecord, request: LaunchRequest) -> bool:
    return (holder.host, holder.pid, holder.boot_id, holder.pid_started) == (
        request.host,
        request.pid,
        request.boot_id,
        request.pid_started,
    )
