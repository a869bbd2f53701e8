"""One save from frozen to proven: C1 to C5 on a background thread, and the three verdicts when it goes wrong."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from ckptfmt.engine import protocol
from ckptfmt.engine.save.admission import admit
from ckptfmt.engine.save.alone import ended
from ckptfmt.engine.save.boards import Looks
from ckptfmt.engine.save.context import LaunchContext, SaveOrder
from ckptfmt.engine.save.outcome import as_data, find_verdict, free_space, is_store_gone, tell, with_fence, words
from ckptfmt.engine.save.patience import Patience
from ckptfmt.engine.save.progress import Earlier, Listener
from ckptfmt.engine.save.snapshot import Snapshot
from ckptfmt.engine.save.waiting import await_verdict, follow, gather, merge, settling
from ckptfmt.engine.save.writing import Share, Writing
from ckptfmt.errors import CatalogError, CkptError, Conflict, OutcomeUnknown, SaveFailed
from ckptfmt.format import layout
from ckptfmt.format.states import State
from ckptfmt.ports.coordination import Failure, RankFailed
from ckptfmt.ports.records import GenerationRecord

log = logging.getLogger("ckptfmt")


class SaveSession:
    """Takes one snapshot through C1 to C5. ``run`` never raises: the listener gets the outcome.

    ``earlier`` are the saves of this launch that are still in flight: this one is merged after their verdicts.
    ``freed`` is told, once, when the snapshot's memory may be used anew.
    """

    def __init__(
        self,
        context: LaunchContext,
        order: SaveOrder,
        snapshot: Snapshot,
        listener: Listener,
        earlier: Sequence[Earlier] = (),
        freed: Callable[[], None] = lambda: None,
    ) -> None:
        self._context = context
        self._order = order
        self._snapshot: Snapshot | None = snapshot
        self._listener = listener
        self._request = order.request(context.commit_timeout * (1 + len(earlier)))
        self._earlier = tuple(earlier)
        self._freed = freed
        self._share: Share | None = None
        self._row: GenerationRecord | None = None
        self._names: list[str] = []
        """Of the objects that this rank has begun, in the generation's folder."""
        self._stage = "begin"
        self._error: BaseException | None = None
        """What ended it, while its verdict is looked for."""
        self._reported = threading.Event()
        self._patience = Patience(context.commit_timeout, self._overdue)

    @property
    def folder(self) -> str:
        return layout.generation_folder(self._context.run.key, self._order.key)

    def run(self) -> None:
        outcome: GenerationRecord | SaveFailed
        try:
            outcome = self._commit()
        except BaseException as error:
            self._error = error
            self._patience.settle(settling(self._context.commit_timeout))
            self._let_go()
            outcome = self._outcome(error)
        self._report(outcome)
        self._leave_behind()

    def _leave_behind(self) -> None:
        """What stays of this save, now that its verdict is told: nothing of it can fail the save."""
        context, row, share = self._context, self._row, self._share
        if row is None:
            return
        if context.spreader is not None and share is not None and row.proven_at is not None:
            context.spreader.add(row, share.part, share.sources)
        if context.stager is not None:
            context.stager.keeper.settled(row)

    def _let_go(self) -> None:
        """The snapshot's memory is free from here on, also of copies that a device has still to make."""
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is not None:
            try:
                snapshot.wait()
            except Exception as error:  # the save has written everything, or has failed for this very reason
                log.warning("run %r: copies from a device failed late: %s", self._context.run.name, error)
            self._freed()

    def _report(self, outcome: GenerationRecord | SaveFailed) -> None:
        if isinstance(outcome, SaveFailed):
            self._listener.failed(outcome)
        else:
            self._listener.succeeded(outcome)
        self._reported.set()

    def wait_reported(self, timeout: float | None = None) -> None:
        """Until the listener has heard the outcome and done what it does then; not for what is left behind."""
        self._reported.wait(timeout)

    # -- C1 to C5 -------------------------------------------------------------------------------
    def _commit(self) -> GenerationRecord:
        row = self._begin()
        self._listener.began(row.id)
        if self._snapshot is not None:
            admit(self._context, row, self._snapshot, self._patience)
        self._stage = "persist"
        self._persist(row)
        self._stage = "merge"
        return self._conclude(row) if self._context.ranks.is_coordinator else self._follow(row)

    def _begin(self) -> GenerationRecord:
        """C1: the generation's row and folder."""
        coordination, patience = self._context.coordination, self._patience
        looks = Looks(coordination.pause)
        patience.give_up()
        with patience.waiting():
            while (row := patience.look(lambda: coordination.begin(self._request))) is None:
                if not patience.left:
                    leader = self._context.ranks.coordinator
                    raise RankFailed(Failure(leader, "begin", "", "it did not begin the save in time"))
                looks.rest(patience.left)
        self._row = row
        if self._context.ranks.is_coordinator:
            patience.repeat(lambda: self._context.site.backend.make_folder(self.folder))
            patience.repeat(lambda: coordination.opened(row))
        return row

    def _persist(self, row: GenerationRecord) -> None:
        """C2: packs, part, acknowledgement."""
        snapshot = self._snapshot
        if snapshot is None:
            raise AssertionError("the snapshot is gone before it was written")
        writing = Writing(self._context, self._order, row, self._patience, self._names.append)
        self._share = writing.run(snapshot, self._staged)

    def _staged(self) -> None:
        """The snapshot's memory is needed no longer."""
        self._let_go()
        self._listener.advance("staged")

    def _conclude(self, row: GenerationRecord) -> GenerationRecord:
        """C3 to C5: the coordinator's."""
        context, patience = self._context, self._patience
        site, fence = context.site, context.launch.fence
        gather(context, row, patience)
        self._await_turn()
        protocol.settle_lower(site, row, fence=fence, until=patience.until, noted=patience.remember)
        parent = patience.repeat(lambda: protocol.parent_of(site, row))
        row = self._row = merge(context, row, parent, patience)
        self._listener.advance("durable")
        self._stage = "commit"
        row = self._row = protocol.commit(site, row, fence=fence, until=patience.until, noted=patience.remember)
        self._stage = "prove"
        proven = self._row = protocol.prove(site, row)
        self._announce(proven)
        return proven

    def _follow(self, row: GenerationRecord) -> GenerationRecord:
        """C3 to C5 are the coordinator's: its verdict is this rank's."""
        self._await_turn()
        row = self._row = follow(self._context, row, self._patience)
        return row

    def _announce(self, row: GenerationRecord) -> None:
        if self._context.ranks.is_coordinator:
            tell("of a verdict", lambda: self._context.coordination.announce(row))

    def _await_turn(self) -> None:
        """Wait for the verdicts on earlier saves: at most until their deadlines, which do not shorten our own."""

        def wait() -> None:
            for save in self._earlier:
                save.wait_done()

        try:
            self._patience.pause_for(wait)
        finally:
            self._earlier = ()

    # -- when it goes wrong ---------------------------------------------------------------------
    def call_off(self, cause: BaseException) -> None:
        """Whoever saves has failed to freeze the state: what is written is not to be acknowledged."""
        snapshot = self._snapshot
        if snapshot is not None:
            snapshot.drop(cause)

    @property
    def overdue(self) -> bool:
        return self._patience.over

    def expire(self) -> None:
        """Called by the watchdog past the deadline: give the verdict on behalf of a writer that does not come back."""
        if not self._patience.expired:
            self._patience.expired = True
            error, snapshot = self._error or self._overdue(), self._snapshot
            if snapshot is not None:
                snapshot.drop(error)  # whoever saves may be waiting for the hung writer to make room
            self._report(self._outcome(error))

    def _overdue(self) -> SaveFailed:
        text = f"not committed within {self._context.commit_timeout:g} s (stage {self._stage}, {self.folder})"
        last = self._patience.passing
        failure = self._failure(text if last is None else f"{text}; the last error: {last}")
        failure.__cause__ = last
        return failure

    def _outcome(self, error: BaseException) -> GenerationRecord | SaveFailed:
        """The verdict, whatever happens on the way: nobody may wait for ever."""
        try:
            return self._settle(error)
        except Exception as second:
            log.exception("the outcome of save %s could not be settled", self._order.key)
            return self._chained(
                OutcomeUnknown, f"{words(error)}; then its outcome could not be settled: {words(second)}", error
            )

    def _settle(self, error: BaseException) -> GenerationRecord | SaveFailed:
        row = self._row
        if row is None:
            self._tell(error, None)
            # Without room or descriptors nothing was written: no answer can have been lost.
            if isinstance(error, CatalogError) and error.transient and error.kind != "catalog_files":
                return self._chained(
                    OutcomeUnknown, f"the catalog could not be reached to begin it: {words(error)}", error
                )
            return self._chained(SaveFailed, f"it could not begin: {words(error)}", error)
        self._tell(error, row)
        try:
            now = await_verdict(self._context, row, self._patience)
            now = now or find_verdict(self._context, row, as_data(self._context, self._stage, error))
        except CkptError as unreachable:
            advice = "see `ckptfmt inspect`, `ckptfmt recover`"
            text = f"{words(error)}; whether it was committed is unknown: {unreachable}; {advice}"
            return self._chained(OutcomeUnknown, text, error)
        self._row = now
        if now.commit_seq is not None:
            # The watchdog must not touch storage: that is what hangs. recover finishes a proof that is pending.
            done = now.proven_at is not None or now.state is not State.COMMITTED or self._patience.expired
            try:
                now = now if done else protocol.prove(self._context.site, now)
            except Conflict as disproved:  # storage says that it was aborted: neither verdict can be given
                return self._chained(OutcomeUnknown, str(disproved), disproved)
            self._announce(now)
            return now
        self._announce(now)
        if not self._patience.expired:  # a writer that may still be alive is left to gc
            free_space(self._context, now, self._names)
        if now.abort_rank not in (None, self._context.ranks.rank) and not isinstance(error, RankFailed):
            told = ended(now)  # another rank failed first: it is the one to name
            told.__cause__, error = error, told
        return self._chained(SaveFailed, words(error), with_fence(self._context, error))

    def _tell(self, error: BaseException, row: GenerationRecord | None) -> None:
        """The other ranks are not to wait for this one in vain."""
        coordination, failure = self._context.coordination, as_data(self._context, self._stage, error)
        if row is None:
            tell("of a failure", lambda: coordination.decline(self._request, failure))
        elif failure.rank == self._context.ranks.rank:  # else they know
            tell("of a failure", lambda: coordination.report_failure(row, failure))

    def _chained(self, kind: type[SaveFailed], text: str, cause: BaseException) -> SaveFailed:
        if isinstance(cause, SaveFailed):
            if kind is SaveFailed:
                return cause
            cause = cause.__cause__ or cause
        failure = self._failure(text, kind)
        if isinstance(cause, RankFailed):
            failure.stage, failure.rank = cause.failure.stage, cause.failure.rank  # None: of no rank
        elif is_store_gone(cause):
            failure.rank = None  # this rank only noticed
        failure.__cause__ = cause
        return failure

    def _failure(self, text: str, kind: type[SaveFailed] = SaveFailed) -> SaveFailed:
        row = self._row
        name = f"generation {row.id}" if row is not None else "the save"
        return kind(
            f"run {self._context.run.name!r}, step {self._order.step}: {name} failed in stage {self._stage}: {text}",
            stage=self._stage,
            rank=self._context.ranks.rank,
            key=self._order.key,
            generation_id=None if row is None else row.id,
        )
