"""One process that can be ended at any of its calls to storage and catalog, without ending the one that tests.

After its death every further call raises and does nothing: its threads run into that and end, and its lease stays
behind as a killed process leaves it.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, cast

from ckptfmt import connect
from ckptfmt.checkpointer import Checkpointer
from ckptfmt.engine.site import Site
from ckptfmt.engine.tiers import Tier, Tiers
from ckptfmt.errors import BackendError, CatalogError, CkptError, Unavailable
from ckptfmt.ports.backend import Backend
from ckptfmt.ports.catalog import Catalog
from ckptfmt.ports.records import LaunchRecord, LaunchRequest
from ckptfmt.repository import Repository
from ckptfmt.testing.catalog_faults import CATALOG_CHANGES, FaultyCatalog, unreachable
from ckptfmt.testing.faults import MUTATIONS, Fault, FaultyBackend
from ckptfmt.tiering import NO_TIERS, TierOrder, with_tiers

__all__ = ["WAYS", "Life", "Operation", "Party", "Place", "Places", "Strike", "Way"]

Party = Literal["storage", "stage", "replica", "catalog"]
"""``storage`` is the durable tier."""
Way = Literal["before", "torn", "after", "lost", "refused"]
"""The process ends before, in the middle of or after a call; or it lives on, and the call fails for it though it took
effect (``lost``), or without having any (``refused``)."""
WAYS: Final[tuple[Way, ...]] = ("before", "torn", "after", "lost", "refused")

_DIVISIBLE: Final = "write_at"
_MANIFEST: Final = re.compile(r"manifest-[0-9a-f]+")
_births: Final = itertools.count(1)


@dataclass(frozen=True)
class Place:
    """Where one repository lies. It outlives the processes that open it."""

    url: str
    catalog: str | None = None
    """URL of its catalog; None = the embedded one."""
    tiers: TierOrder = NO_TIERS
    """What is opened beside the durable tier."""

    def connect(self, mode: Literal["r", "w"], *, proof: bool = False) -> connect.Connection:
        """Open it, with ``proof`` without its catalog."""
        opened = connect.open_site(
            self.url, mode=mode, catalog=connect.NO_CATALOG if proof else self.catalog, storage_options=None
        )
        return with_tiers(opened, self.tiers)

    def open(self, mode: Literal["r", "w"], *, proof: bool = False) -> Repository:
        return Repository(self.connect(mode, proof=proof), mode)


class Places(Protocol):
    """Makes places of the kind under test."""

    def empty(self) -> Place:
        """A place in which nothing was ever saved."""

    def keep(self, place: Place) -> Callable[[], None]:
        """Remember what it holds: objects, folders and catalog. Calling the answer brings it back to that."""

    def forget(self, place: Place) -> None:
        """Nobody needs it any more."""


@dataclass(frozen=True, order=True)
class Operation:
    """One call, under a name that is the same each time the same work is done."""

    party: Party
    op: str
    key: str
    """Of an object, without what differs from time to time; '' for the catalog."""
    offset: int
    """-1 where there is none."""
    nth: int
    """Counts the calls that are equal so far, from 1."""

    @property
    def changes(self) -> bool:
        return self.op in (CATALOG_CHANGES if self.party == "catalog" else MUTATIONS)

    @property
    def ways(self) -> tuple[Way, ...]:
        """What can happen there. Calls other than ``write_at`` are all or nothing: torn would be before once more.

        A call that changes nothing leaves the same behind whenever it ends.
        """
        if not self.changes:
            return ("before", "lost")
        return WAYS if self.op == _DIVISIBLE else ("before", "after", "lost", "refused")

    def __str__(self) -> str:
        where = f" {self.key.rpartition('/')[2]}" if self.key else ""
        at = "" if self.offset < 0 else f" at {self.offset}"
        return f"{self.party} {self.op}{where}{at}{f' ({self.nth})' if self.nth > 1 else ''}"


@dataclass(eq=False)
class Strike:
    """What happens at one operation of a life: one of ``WAYS``, or ``meanwhile`` just before it."""

    operation: Operation
    way: Way | None
    meanwhile: Callable[[], None] | None = None
    end: Callable[[], object] | None = None
    """Ends the process for good, in place of the death that is simulated."""
    reached: bool = False


class Life:
    """One process: a repository whose every call is counted, and in which ``strike`` happens.

    Launches of one life belong to a process that is no more, as far as another life can tell: a new launch follows it
    at once, as it follows a killed process of the same host. Calls of daemon threads (the lease's heartbeat) come
    when they like, so that they are not counted.
    """

    def __init__(self, place: Place, strike: Strike | None = None, *, opened: bool = True) -> None:
        self.place = place
        self.born = f"life {next(_births)}"
        self.operations: list[Operation] = []
        self.dead = threading.Event()
        self._strike = strike
        self._lock = threading.Lock()
        self._counts: Counter[tuple[Party, str, str, int]] = Counter()
        self._checkpointers: list[Checkpointer] = []
        self._connection = self._open() if opened else None

    def _open(self) -> connect.Connection:
        connection = self.place.connect("w")
        site = dataclasses.replace(
            connection.site,
            backend=self.watched_backend(connection.site.backend),
            tiers=self._watched_tiers(connection.site.tiers),
            catalog=self.watched_catalog(connection.site.sql()),
        )
        self._repository = Repository(dataclasses.replace(connection, site=site), "w")
        return dataclasses.replace(connection, site=site)

    def watched_backend(self, inner: Backend, party: Party = "storage") -> FaultyBackend:
        """``inner`` as this process uses it, for work that opens its parts by itself."""
        return _Storage(self, inner, party)

    def _watched_tiers(self, tiers: Tiers) -> Tiers:
        def watched(tier: Tier) -> Tier:
            party: Party = "stage" if tier.role == "stage" else "replica"
            return dataclasses.replace(tier, backend=self.watched_backend(tier.backend, party))

        stage = None if tiers.stage is None else watched(tiers.stage)
        return dataclasses.replace(tiers, stage=stage, replicas=tuple(map(watched, tiers.replicas)))

    def watched_catalog(self, inner: Catalog) -> Catalog:
        return cast(Catalog, _Sql(self, inner))

    @property
    def repository(self) -> Repository:
        return self._repository

    @property
    def site(self) -> Site:
        assert self._connection is not None, "this life has opened nothing"
        return self._connection.site

    @property
    def backend(self) -> FaultyBackend:
        """The storage of ``site``, for more faults."""
        return cast(FaultyBackend, self.site.backend)

    @property
    def storage(self) -> list[FaultyBackend]:
        """That of all tiers, the durable one first."""
        return [self.backend, *(cast(FaultyBackend, tier.backend) for tier in self.site.tiers.every())]

    def checkpointer(self, run: str, **options: Any) -> Checkpointer:
        made = self.repository.checkpointer(run, **options)
        self._checkpointers.append(made)
        return made

    def die(self) -> None:
        """From here on neither storage nor catalog hears anything from this process."""
        self.dead.set()

    def end(self) -> None:
        """Give back what the process had: a dead one has nothing to say about it."""
        for checkpointer in self._checkpointers:
            try:
                checkpointer.close(timeout=30)
            except (CkptError, TimeoutError):
                self.die()
                checkpointer.close()
        if self._connection is not None:
            self.repository.close()

    # -- what its calls go through ----------------------------------------------------------------
    def arrive(self, party: Party, op: str, key: str, offset: int = -1) -> list[Fault]:
        """Count a call. Returns what goes wrong with it."""
        self.check_alive(party)
        if threading.current_thread().daemon:
            return []
        key = "" if party == "catalog" else _MANIFEST.sub("manifest", key)
        with self._lock:
            self._counts[party, op, key, offset] += 1
            operation = Operation(party, op, key, offset, self._counts[party, op, key, offset])
            self.operations.append(operation)
        strike = self._strike
        if strike is None or strike.reached or operation != strike.operation:
            return []
        strike.reached = True
        if strike.meanwhile is not None:
            strike.meanwhile()
        return [] if strike.way is None else [self._fault(strike.way, party)]

    def check_alive(self, party: Party) -> None:
        if self.dead.is_set():
            raise _dead(party)

    def _fault(self, way: Way, party: Party) -> Fault:
        if way == "lost":
            return Fault(error=lambda: _unanswered(party), timing="after")
        if way == "refused":
            return Fault(error=lambda: _unanswered(party), timing="before")

        def kill() -> BaseException:
            if self._strike is not None and self._strike.end is not None:
                self._strike.end()
            self.die()
            return _dead(party)

        return Fault(error=kill, timing=way)


def _dead(party: Party) -> CkptError:
    return CatalogError("this process is dead") if party == "catalog" else BackendError("this process is dead")


def _unanswered(party: Party) -> CkptError:
    return unreachable() if party == "catalog" else Unavailable("the storage did not answer; try again later")


class _Storage(FaultyBackend):
    def __init__(self, life: Life, inner: Backend, party: Party) -> None:
        super().__init__(inner)
        self._life = life
        self._party = party

    def _arrive(self, op: str, key: str, offset: int | None, nbytes: int | None) -> list[Fault]:
        at = -1 if offset is None else offset
        faults = [*self._life.arrive(self._party, op, key, at), *super()._arrive(op, key, offset, nbytes)]
        self._life.check_alive(self._party)  # it may have died while this call was held up
        return faults


class _Sql(FaultyCatalog):
    def __init__(self, life: Life, inner: Catalog) -> None:
        super().__init__(inner)
        self._life = life

    def _arrive(self, op: str, key: str, offset: int | None, nbytes: int | None) -> list[Fault]:
        faults = [*self._life.arrive("catalog", op, key), *super()._arrive(op, key, offset, nbytes)]
        self._life.check_alive("catalog")
        return faults

    def acquire_launch(
        self, run: str, request: LaunchRequest, *, lease_seconds: float, displace: int | None = None, rank: int = 0
    ) -> LaunchRecord:
        """As a process of its own, which began at another time than this one."""
        request = dataclasses.replace(request, pid_started=self._life.born)
        named = {"lease_seconds": lease_seconds, "displace": displace, "rank": rank}
        answer = self._call("acquire_launch", self._inner.acquire_launch, (run, request), named)
        return cast(LaunchRecord, answer)
