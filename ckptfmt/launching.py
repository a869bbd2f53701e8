"""Beginning a launch: lease, fence, and the older launch's rows settled before anything is restored."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from ckptfmt import connect, reading
from ckptfmt.checkpointer import Checkpointer
from ckptfmt.engine.keep.recover import prove_committed, settle_older
from ckptfmt.engine.save.alone import Alone
from ckptfmt.engine.save.context import LaunchContext
from ckptfmt.engine.save.launch import acquire, launch_token
from ckptfmt.errors import CatalogError, InvalidInput
from ckptfmt.format import layout
from ckptfmt.policy import Modes, PreemptionFlag, SavePolicy
from ckptfmt.ports.catalog import UNWRITABLE


@dataclass(frozen=True)
class LaunchOrder:
    """What ``Repository.checkpointer`` was asked for. ``commit_timeout`` is in seconds."""

    run: str
    policy: SavePolicy
    modes: Modes
    signals: tuple[int, ...]
    commit_timeout: float
    token: str | None
    takeover: bool


def begin_launch(connection: connect.Connection, order: LaunchOrder) -> Checkpointer:
    """Take the run's lease and return its checkpointer."""
    if not order.commit_timeout > 0:
        raise InvalidInput(f"commit_timeout={order.commit_timeout!r}: give a positive number of seconds")
    try:
        return _begin(connection, order)
    except CatalogError as error:
        if error.kind not in UNWRITABLE:
            raise
        raise CatalogError(
            f"run {order.run!r}: no launch can begin, since it takes the run's lease in the catalog: {error}; what is "
            f'committed can be read all the same: ckptfmt.restore(state, "{connection.url}", run={order.run!r}), or '
            'open(..., mode="r")',
            kind=error.kind,
            transient=error.transient,
        ) from error


def _begin(connection: connect.Connection, order: LaunchOrder) -> Checkpointer:
    run = order.run
    site = connection.site
    catalog = site.sql()
    record = catalog.ensure_run(run, layout.run_key(run))
    held = acquire(catalog, run, token=launch_token(order.token), takeover=order.takeover)
    flag = None
    try:
        settle_older(site, run, held)
        prove_committed(site, run, dry_run=False)
        flag = PreemptionFlag(order.signals)
        context = LaunchContext(
            site=site,
            run=record,
            launch=held,
            coordination=Alone(catalog),
            commit_timeout=order.commit_timeout,
        )
        return Checkpointer(
            context,
            policy=order.policy,
            modes=order.modes,
            flag=flag,
            families=connect.live_families,
            open_row=partial(reading.open_record, connection),
            open_at=partial(reading.find, connection, run),
        )
    except BaseException:
        if flag is not None:
            flag.close()
        catalog.close_launch(held.id)
        raise
