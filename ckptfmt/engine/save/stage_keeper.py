"""Which generations a launch keeps on its stage: the last commits for fast restores, unfinished ones, no others."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from typing import Final

from ckptfmt.engine import stage
from ckptfmt.engine.tiers import Tier
from ckptfmt.errors import CkptError
from ckptfmt.format import layout
from ckptfmt.format.states import OPEN_STATES, State
from ckptfmt.ports.catalog import Catalog
from ckptfmt.ports.records import GenerationRecord

log = logging.getLogger("ckptfmt")

_OPEN: Final = (None, None)
"""A save of this launch whose verdict is out."""


class StageKeeper:
    """The stage of one rank, for one run. Several ranks of a host share a stage: of what this launch saved each frees
    its own objects, since another may not have heard the verdict yet. What older launches left anybody frees.

    What it needs to know of generations the catalog is asked once for each: the verdicts of this launch it hears.
    Thread-safe.
    """

    def __init__(self, tier: Tier, catalog: Catalog, run_key: str, rank: int) -> None:
        self._tier = tier
        self._catalog = catalog
        self._run_key = run_key
        self._rank = rank
        self._lock = threading.Lock()
        self._own: dict[str, tuple[State | None, int | None]] = {}
        """State and commit number of what this launch saves, by key."""
        self._older: dict[str, tuple[State | None, int | None]] = {}
        """The same of what older launches left, once it is settled."""
        self._told: set[str] = set()

    @property
    def _keep(self) -> int:
        return int(self._tier.options.get("keep", 1))

    @property
    def _bytes_max(self) -> int | None:
        return self._tier.options.get("bytes_max")

    def begin(self, key: str) -> None:
        """A save of this launch begins: its objects stay until its verdict is heard."""
        with self._lock:
            self._own[key] = _OPEN

    def drop(self, row: GenerationRecord, names: Iterable[str]) -> None:
        """The save is not staged after all: remove what was begun of it."""
        stage.free(self._tier, row.run_key, row.key, names)

    def settled(self, row: GenerationRecord) -> None:
        """The verdict on a save of this launch: clean."""
        with self._lock:
            self._own[row.key] = (row.state, row.commit_seq)
        self.clean()

    def clean(self) -> None:
        """Free all but the last commits, and what is or may be under way. Never raises: the next time will do."""
        try:
            self._free(self._removable(self._keep))
        except CkptError as error:
            log.warning("%s is not cleaned: %s", self._tier.name, error)

    def room(self) -> int | None:
        """Bytes that a save may take now; None: there is no telling. Less than 0 where the limit is passed already."""
        rooms = [self._tier.backend.space()]
        if self._bytes_max is not None:
            rooms.append(self._bytes_max - sum(each.nbytes for each in stage.held(self._tier)))
        known = [room for room in rooms if room is not None]
        return min(known) if known else None

    def make_room(self, needed: int) -> int | None:
        """Free what may go, and if that is not enough the last commits as well, the oldest first; then as ``room``."""
        for keep in range(self._keep, -1, -1):
            self._free(self._removable(keep))
            room = self.room()
            if room is None or room >= needed:
                break
        return room

    def _free(self, chosen: list[stage.Held]) -> None:
        for each in chosen:
            own = each.key in self._own
            names = [name for name in each.names if not own or layout.is_of_rank(name, self._rank)]
            stage.free(self._tier, each.run_key, each.key, names)

    def _removable(self, keep: int) -> list[stage.Held]:
        """What may go, by the run of this launch: other runs have keepers of their own."""
        found = [each for each in stage.held(self._tier) if each.run_key == self._run_key]
        self._forget({each.key for each in found})
        known = {each.key: self._known(each.key) for each in found}
        committed = sorted(
            (seq, key) for key, (state, seq) in known.items() if state is State.COMMITTED and seq is not None
        )
        kept = {key for _, key in committed[max(0, len(committed) - keep) :]} if keep else set()
        return [
            each
            for each in found
            if each.key not in kept and known[each.key][0] is not None and known[each.key][0] not in OPEN_STATES
        ]

    def _forget(self, present: set[str]) -> None:
        """What has its verdict and is gone from the stage."""
        with self._lock:
            over = [key for key, (state, _) in self._own.items() if state not in (None, *OPEN_STATES)]
            for key in set(over) - present:
                del self._own[key]

    def _known(self, key: str) -> tuple[State | None, int | None]:
        """State and commit number; no state where it must stay."""
        with self._lock:
            known = self._own.get(key) or self._older.get(key)
        if known is not None:
            return known
        row = self._catalog.generation_by_key(key)
        if row is None:
            if key not in self._told:
                self._told.add(key)
                told = "%s holds generation %s (run folder %s), which the catalog does not know: it stays"
                log.warning(told, self._tier.name, key, self._run_key)
            return _OPEN
        found = (row.state, row.commit_seq)
        if row.state not in OPEN_STATES:
            with self._lock:
                self._older[key] = found
        return found
