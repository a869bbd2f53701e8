"""What became of a save that raised. Three verdicts: committed, aborted, unknown.

"Aborted" is said only once the catalog says so. A commit whose answer was lost, or that a newer launch finished, is
a success.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from ckptfmt.engine import protocol
from ckptfmt.engine.save.context import LaunchContext
from ckptfmt.engine.sweep import sweep_aborted, sweep_share
from ckptfmt.errors import BackendError, CatalogError, CkptError, Conflict, Fenced, SaveFailed
from ckptfmt.format.states import OPEN_STATES
from ckptfmt.ports.catalog import Catalog
from ckptfmt.ports.coordination import STORE_GONE, Failure, RankFailed
from ckptfmt.ports.records import GenerationRecord, LaunchRecord

log = logging.getLogger("ckptfmt")

SETTLE_SECONDS = 20.0
"""How long a failed save looks for its verdict before its outcome is called unknown."""
_POLL_SECONDS = 0.1
_TELL_SECONDS = 5.0
REASON_LENGTH_MAX = 1000


def find_verdict(context: LaunchContext, row: GenerationRecord, failure: Failure) -> GenerationRecord:
    """The row in a terminal state: aborted by us, or as whoever took the run has settled it.

    Raises what kept the verdict from being found; the outcome is unknown then.
    """
    until = time.monotonic() + SETTLE_SECONDS
    return protocol.repeat(lambda: _verdict(context, row, failure, until), until=until)


def _verdict(context: LaunchContext, row: GenerationRecord, failure: Failure, until: float) -> GenerationRecord:
    catalog = context.site.sql()
    while True:
        now = catalog.generation(row.id)
        if now is not None and now.state not in OPEN_STATES:
            return now
        try:
            return catalog.abort(
                row.id,
                stage=failure.stage,
                rank=failure.rank,
                reason=failure.reason[:REASON_LENGTH_MAX],
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


def free_space(context: LaunchContext, row: GenerationRecord, names: Sequence[str]) -> None:
    """Remove what an aborted save wrote: a full disk is the likeliest reason for it.

    Where other ranks may be writing still, each removes the objects that it began, by their ``names``; the rest is left
    to gc.
    """
    try:
        if context.ranks.members == (context.ranks.rank,):
            sweep_aborted(context.site, row)
        else:
            sweep_share(context.site, row, names)
    except (BackendError, CatalogError, Conflict) as error:
        log.warning("objects of the aborted generation %d are left to `ckptfmt gc`: %s", row.id, error)


def as_data(context: LaunchContext, stage: str, error: BaseException) -> Failure:
    """An error as the other ranks and the catalog are told of it: words, whatever it holds.

    A store that is gone is of no rank: every rank that lives meets it.
    """
    if isinstance(error, RankFailed):
        return error.failure
    rank = None if is_store_gone(error) else context.ranks.rank
    if isinstance(error, SaveFailed):
        stage, rank = error.stage, rank if error.rank is None else error.rank
    return Failure(rank, stage, type(error).__name__, words(error))


def is_store_gone(error: BaseException | None) -> bool:
    """Whether an error, or its cause, is the loss of the board."""
    while error is not None:
        if isinstance(error, CatalogError) and error.kind == STORE_GONE:
            return True
        error = error.__cause__
    return False


def words(error: BaseException) -> str:
    """What an error says, as any database and any other rank can take it."""
    try:
        text = str(error)
    except Exception as broken:  # an exception of somebody else's, that cannot even tell what it is
        text = f"{type(error).__name__}, which cannot be shown ({type(broken).__name__})"
    # The text may quote a file name that is no valid Unicode, which no database takes.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")[:REASON_LENGTH_MAX]


def tell(what: str, call: Callable[[], object]) -> None:
    """Tell the other ranks, if it can be done soon: they have a deadline of their own."""
    try:
        protocol.repeat(call, until=time.monotonic() + _TELL_SECONDS)
    except CkptError as error:
        log.warning("the other ranks are not told %s: %s", what, error)


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
    try:
        fenced = fenced_by(context.site.sql(), context.launch)
    except CatalogError:
        return error
    if fenced is None:
        return error
    fenced.__cause__ = error
    return fenced


def fenced_by(catalog: Catalog, launch: LaunchRecord) -> Fenced | None:
    """What to raise where a newer launch has the run; None where none has."""
    fence = next(run.fence for run in catalog.runs() if run.name == launch.run)
    if fence == launch.fence:
        return None
    return Fenced(
        f"launch {launch.id} of run {launch.run!r} has fence {launch.fence}, but a newer launch raised it to {fence}: "
        "this process must stop saving to the run"
    )
