"""What became of a save that raised. Three verdicts: committed, aborted, unknown.

"Aborted" is said only once the catalog says so. A commit whose answer was lost, or that a newer launch finished, is
a success.
"""

from __future__ import annotations

import logging
import time

from ckptfmt.engine import protocol
from ckptfmt.engine.save.context import LaunchContext
from ckptfmt.engine.sweep import sweep_aborted
from ckptfmt.errors import BackendError, CatalogError, Conflict, Fenced
from ckptfmt.format.states import OPEN_STATES
from ckptfmt.ports.records import GenerationRecord

log = logging.getLogger("ckptfmt")

SETTLE_SECONDS = 20.0
"""How long a failed save looks for its verdict before its outcome is called unknown."""
_POLL_SECONDS = 0.1
_REASON_LENGTH_MAX = 1000


def find_verdict(
    context: LaunchContext, row: GenerationRecord, *, stage: str, error: BaseException
) -> GenerationRecord:
    """The row in a terminal state: aborted by us, or as whoever took the run has settled it.

    Raises what kept the verdict from being found; the outcome is unknown then.
    """
    until = time.monotonic() + SETTLE_SECONDS
    return protocol.repeat(lambda: _verdict(context, row, stage, error, until), until=until)


def _verdict(
    context: LaunchContext, row: GenerationRecord, stage: str, error: BaseException, until: float
) -> GenerationRecord:
    catalog = context.site.sql()
    # The text may quote a file name that is no valid Unicode, which no database takes.
    reason = f"{type(error).__name__}: {error}".encode("utf-8", "backslashreplace").decode("utf-8")
    while True:
        now = catalog.generation(row.id)
        if now is not None and now.state not in OPEN_STATES:
            return now
        try:
            return catalog.abort(
                row.id,
                stage=stage,
                rank=context.coordination.rank,
                reason=reason[:_REASON_LENGTH_MAX],
                fence=context.launch.fence,
            )
        except Conflict:
            # Fenced: the newer launch settles this row, and may even finish it. Or it was committed meanwhile.
            if time.monotonic() > until:
                raise
        except CatalogError as refused:
            # No room for so much as the verdict: somebody may make some.
            if refused.kind != "catalog_full" or time.monotonic() > until:
                raise
        time.sleep(_POLL_SECONDS)


def free_space(context: LaunchContext, row: GenerationRecord) -> None:
    """Remove what an aborted save wrote: a full disk is the likeliest reason for it."""
    try:
        sweep_aborted(context.site, row)
    except (BackendError, CatalogError, Conflict) as error:
        log.warning("objects of the aborted generation %d are left to `ckptfmt gc`: %s", row.id, error)


def find_fenced(error: BaseException | None) -> Fenced | None:
    """The ``Fenced`` among an error and its causes."""
    while error is not None:
        if isinstance(error, Fenced):
            return error
        error = error.__cause__
    return None


def with_fence(context: LaunchContext, error: BaseException) -> BaseException:
    """``error``, under a ``Fenced`` where a newer launch is the reason: a row that it settled only says
    "no longer writing"."""
    if find_fenced(error) is not None:
        return error
    launch = context.launch
    try:
        fence = next(run.fence for run in context.site.sql().runs() if run.id == context.run.id)
    except CatalogError:
        return error
    if fence == launch.fence:
        return error
    fenced = Fenced(
        f"launch {launch.id} of run {context.run.name!r} has fence {launch.fence}, but a newer launch raised it to "
        f"{fence}: this process must stop saving to the run"
    )
    fenced.__cause__ = error
    return fenced
