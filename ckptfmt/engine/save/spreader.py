"""Replicas get what is committed, one generation after the other, beside training. Nothing here fails a save."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from ckptfmt.engine import spread, verdicts
from ckptfmt.engine.opened import read_manifest
from ckptfmt.engine.replicate import Pace, Source
from ckptfmt.engine.save.boards import Looks
from ckptfmt.engine.save.context import Ranks
from ckptfmt.engine.save.outcome import tell, words
from ckptfmt.engine.site import Site
from ckptfmt.engine.tiers import Tier
from ckptfmt.engine.transfer import Background
from ckptfmt.errors import CatalogError, CkptError
from ckptfmt.format.manifest import Manifest, manifest_digest
from ckptfmt.format.part import Part, encode_part
from ckptfmt.ports.coordination import Board, Body
from ckptfmt.ports.records import GenerationRecord

log = logging.getLogger("ckptfmt")

_BACKLOG_MAX: Final = 8
"""Generations that wait for their turn: where a replica is slower than saves come, the oldest give up theirs."""
_LOOK_SECONDS: Final = 2.0
_LAST_LOOKS_SECONDS: Final = 30.0
"""At the end of a launch: how long other ranks may be seen to do nothing before they are waited for no longer."""


@dataclass(frozen=True)
class _Order:
    row: GenerationRecord
    part: Part
    sources: tuple[Source, ...]


class GivenUp(CkptError):
    """The launch ends, and does not wait for replicas."""


class Spreader:
    """Of one rank: it copies its own packs and tells the coordinator; the coordinator's goes on to what proves them,
    once every rank has said that it compared what it copied. ``board`` may be None where no other rank saves."""

    def __init__(self, site: Site, ranks: Ranks, board: Board | None, *, patience: float) -> None:
        self._site = site
        self._ranks = ranks
        self._board = board
        self._others = [rank for rank in ranks.members if rank != ranks.rank]
        self._patience = patience
        self._unforgotten: dict[str, list[str]] = {}
        """Topics with messages of other ranks, by tier. Of the coordinator's thread."""
        self._changed = threading.Condition()
        self._orders: deque[_Order] = deque()
        self._thread: Background | None = None
        self._closing = False
        self._over = False
        self._moved_at = 0.0
        """When something was last seen to happen (``time.monotonic``)."""

    def add(self, row: GenerationRecord, part: Part, sources: Sequence[Source]) -> None:
        """A generation is committed and proven: its turn comes. Returns at once."""
        with self._changed:
            if self._closing:  # a writer that hung has come back: its launch is over
                return
            self._orders.append(_Order(row, part, tuple(sources)))
            if len(self._orders) > _BACKLOG_MAX:
                late = self._orders.popleft()
                told = "generation %d of run %r stays off replicas, which are too slow: `ckptfmt replicate` catches up"
                log.warning(told, late.row.id, late.row.run)
            if self._thread is None:
                thread = Background(self._work, name="ckptfmt-spread")
                try:
                    thread.start()
                except RuntimeError as error:  # the next save tries again
                    log.warning("replicas wait: %s", error)
                else:
                    self._thread = thread

    def close(self, timeout: float | None = None) -> None:
        """Wait for what is under way, or give it up after ``timeout`` seconds, or once nothing has happened for as long
        as a save may take: a place may hang for ever. Its lag is told by the catalog."""
        until = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            self._closing, self._moved_at = True, time.monotonic()
            while self._thread is not None:
                now = time.monotonic()
                left = self._moved_at + self._patience - now
                if until is not None:
                    left = min(left, until - now)
                if left <= 0:
                    self._over = True
                    log.warning("replicas are not waited for: `ckptfmt replicate` catches up")
                    return
                self._changed.wait(left)

    # -- on its own thread ----------------------------------------------------------------------
    def _work(self) -> None:
        while True:
            with self._changed:
                order = self._orders.popleft() if self._orders and not self._over else None
                self._moved_at = time.monotonic()
                if order is None:
                    self._thread = None
                    self._changed.notify_all()
                    return
            for tier in self._site.tiers.replicas:
                self._spread(order, tier)

    def _spread(self, order: _Order, tier: Tier) -> None:
        row = order.row
        pace = Pace(limiter=self._site.tiers.limiter, give_up=self._give_up, copied=self._note_moved)
        try:
            if tier.uuid not in row.tiers:  # else each part has said so
                self._copy_packs(order, tier, pace)
            if self._ranks.is_coordinator:
                manifest = self._manifest(row)
                if tier.uuid not in row.tiers and self._others:
                    self._await_others(row, manifest, tier)
                spread.copy_verdict(self._site, row, manifest, tier)
        except Exception as error:
            told = "generation %d of run %r is not on the %s: %s; `ckptfmt replicate` catches up"
            log.warning(told, row.id, row.run, tier.name, error)

    def _copy_packs(self, order: _Order, tier: Tier, pace: Pace) -> None:
        """Tell the coordinator of the part whose packs are there now, each chunk compared; or why they are not."""
        fault: str | None = None
        try:
            spread.copy_packs(order.row, order.part, tier, order.sources, pace)
        except BaseException as error:
            fault = words(error)
            raise
        finally:
            board, rank = self._board, self._ranks.rank
            if board is not None and not self._ranks.is_coordinator and not self._over:
                body = {"part": manifest_digest(encode_part(order.part)), "fault": fault}
                tell("what this rank has copied", lambda: board.post(_topic(order.row, tier), rank, body))

    def _manifest(self, row: GenerationRecord) -> Manifest:
        if row.manifest_name is None or row.manifest_digest is None:
            raise AssertionError("committed without a manifest")
        return read_manifest(self._site, verdicts.folder_of(row), row.manifest_name, row.manifest_digest, row.key)

    def _await_others(self, row: GenerationRecord, manifest: Manifest, tier: Tier) -> None:
        """Until each other rank has copied what its part names, by its own word: what lies there under the name of a
        pack, and is as long, may be what somebody left who died. As long as something happens."""
        board, topic = self._board, _topic(row, tier)
        if board is None:
            raise AssertionError("several ranks without a board")
        self._unforgotten.setdefault(tier.uuid, []).append(topic)
        looks, since, before = Looks(_LOOK_SECONDS), time.monotonic(), -1
        while (heard := self._heard(board, topic)) is None:
            left = len(spread.missing_packs(row, manifest, tier))
            if left != before:
                since, before = time.monotonic(), left
                self._note_moved()
            ending = self._closing or not threading.main_thread().is_alive()  # the interpreter waits for this thread
            if time.monotonic() - since > (_LAST_LOOKS_SECONDS if ending else self._patience):
                raise GivenUp("not every rank says that its packs are there")
            self._give_up()
            looks.rest()
        self._forget(board, tier)
        parts = {rank.rank: rank.part_digest for rank in self._site.sql().ranks(row.id)}
        for rank, body in sorted(heard.items()):
            if body["fault"] is not None:
                raise GivenUp(f"rank {rank}: {body['fault']}")
            if body["part"] != parts.get(rank):
                raise GivenUp(f"rank {rank} has copied what another part names than the one that it acknowledged")

    def _heard(self, board: Board, topic: str) -> dict[int, Body] | None:
        """What all other ranks say; None while one has said nothing, or the board does not answer."""
        try:
            return board.complete(topic, self._others)
        except CatalogError as error:
            if not error.transient:
                raise
            return None

    def _forget(self, board: Board, tier: Tier) -> None:
        """The messages about this generation, and those before it that were given up: each rank has gone on."""
        for topic in self._unforgotten.pop(tier.uuid, []):
            tell("that their copies are known", partial(board.forget, topic, self._others))

    def _note_moved(self, nbytes: int = 0) -> None:
        self._moved_at = time.monotonic()

    def _give_up(self) -> None:
        if self._over:
            raise GivenUp("the launch has ended")


def _topic(row: GenerationRecord, tier: Tier) -> str:
    return f"replica/{row.save_number}/{tier.uuid}"
