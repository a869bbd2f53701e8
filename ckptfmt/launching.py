"""Beginning a launch: lease, fence, and the older launch's rows settled before anything is restored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckptfmt import connect
from ckptfmt.checkpointer import Checkpointer
from ckptfmt.engine.keep.recover import prove_committed, settle_older
from ckptfmt.engine.save.alone import Alone
from ckptfmt.engine.save.launch import acquire, launch_token
from ckptfmt.engine.save.session import LaunchContext
from ckptfmt.errors import InvalidInput
from ckptfmt.format import layout
from ckptfmt.policy import PreemptionFlag, SavePolicy

if TYPE_CHECKING:
    from ckptfmt.repository import Repository


def begin_launch(
    repository: Repository,
    run: str,
    options: Mapping[str, Any],
    signals: Sequence[int],
    *,
    commit_timeout: float,
    launch: str | None,
    takeover: bool,
) -> Checkpointer:
    """Take the run's lease and return its checkpointer."""
    policy = SavePolicy(**options)
    if not commit_timeout > 0:
        raise InvalidInput(f"commit_timeout={commit_timeout!r}: give a positive number of seconds")
    site = repository.site
    catalog = site.sql()
    record = catalog.ensure_run(run, layout.run_key(run))
    token = launch_token(launch)
    held = acquire(catalog, run, token=token, takeover=takeover)
    flag = None
    try:
        settle_older(site, run, held)
        prove_committed(site, run, dry_run=False)
        flag = PreemptionFlag(signals)
        context = LaunchContext(
            site=site,
            run=record,
            launch=held,
            coordination=Alone(catalog),
            commit_timeout=commit_timeout,
        )
        return Checkpointer(
            context,
            policy=policy,
            flag=flag,
            families=connect.live_families,
            open_row=repository.opened,
            open_at=lambda at: repository.find(run, at),
        )
    except BaseException:
        if flag is not None:
            flag.close()
        catalog.close_launch(held.id)
        raise
