"""A repository with a stage and replicas, all in memory, where every call to each of them can be broken or held."""

from __future__ import annotations

import dataclasses
import shutil
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ckptfmt import connect
from ckptfmt.backends.memory import MemoryBackend
from ckptfmt.checkpointer import Checkpointer
from ckptfmt.engine.tiers import Tier, Tiers
from ckptfmt.errors import BackendError, CatalogError
from ckptfmt.format import layout
from ckptfmt.ports.records import GenerationRecord, RankRecord
from ckptfmt.repository import Repository
from ckptfmt.testing.catalog_faults import FaultyCatalog
from ckptfmt.testing.faults import Call, Fault, FaultyBackend
from ckptfmt.tiering import TierOrder, with_tiers


class Process:
    """One opening of the place, whose parts can be reached. ``dead`` is shared by all of them."""

    def __init__(self, place: TieredPlace, order: TierOrder) -> None:
        opened = with_tiers(
            connect.open_site(place.url, mode="w", catalog=place.catalog_url, storage_options=None), order
        )
        self.dead = False
        self.backend = _Mortal(self, opened.site.backend)
        self.catalog = _MortalCatalog(self, opened.site.sql())
        tiers = opened.site.tiers
        stage = None if tiers.stage is None else self._watched(tiers.stage)
        self.replicas = [self._watched(tier) for tier in tiers.replicas]
        self.site = dataclasses.replace(
            opened.site,
            backend=self.backend,
            catalog=self.catalog,
            tiers=Tiers(stage, tuple(self.replicas), tiers.durable_on, tiers.limiter),
        )
        self.repository = Repository(dataclasses.replace(opened, site=self.site), "w")
        self.checkpointers: list[Checkpointer] = []

    def _watched(self, tier: Tier) -> Tier:
        return dataclasses.replace(tier, backend=_Mortal(self, tier.backend))

    @property
    def stage(self) -> FaultyBackend:
        assert self.site.tiers.stage is not None
        found = self.site.tiers.stage.backend
        assert isinstance(found, FaultyBackend)
        return found

    def replica(self, index: int = 0) -> FaultyBackend:
        found = self.replicas[index].backend
        assert isinstance(found, FaultyBackend)
        return found

    @property
    def storage(self) -> list[FaultyBackend]:
        stage = [] if self.site.tiers.stage is None else [self.stage]
        return [self.backend, *stage, *(self.replica(index) for index in range(len(self.replicas)))]

    def checkpointer(self, run: str = "run", **options: Any) -> Checkpointer:
        opened = self.repository.checkpointer(run, **options)
        self.checkpointers.append(opened)
        return opened

    def die(self) -> BaseException:
        """From now on nobody hears anything from this process: ``error=process.die``."""
        self.dead = True
        return BackendError("this process is dead")

    def rows(self, run: str = "run") -> list[GenerationRecord]:
        """All generations, oldest first."""
        return sorted(self.site.sql().generations(run=run), key=lambda row: row.id)

    def rank(self, number: int = 0) -> RankRecord:
        """Of the newest generation."""
        return self.site.sql().ranks(self.rows()[-1].id)[number]

    def events(self, run: str = "run") -> list[str]:
        return [event.kind for event in self.site.sql().events(run=run)]

    def end(self) -> None:
        for backend in self.storage:
            for fault in backend._faults:
                if fault.hold is not None:
                    fault.hold.set()
        for checkpointer in self.checkpointers:
            try:
                checkpointer.close(timeout=20)
            except Exception:
                self.die()
                checkpointer.close()
        self.repository.close()


class _Mortal(FaultyBackend):
    def __init__(self, process: Process, inner: Any) -> None:
        super().__init__(inner)
        self._process = process

    def _arrive(self, op: str, key: str, offset: int | None, nbytes: int | None) -> list[Fault]:
        if self._process.dead:
            raise BackendError("this process is dead")
        firing = super()._arrive(op, key, offset, nbytes)
        if self._process.dead:  # it died while this call was held up
            raise BackendError("this process is dead")
        return firing


class _MortalCatalog(FaultyCatalog):
    def __init__(self, process: Process, inner: Any) -> None:
        super().__init__(inner)
        self._process = process

    def _arrive(self, op: str, key: str, offset: int | None, nbytes: int | None) -> list[Fault]:
        if self._process.dead:
            raise CatalogError("this process is dead")
        return super()._arrive(op, key, offset, nbytes)


class TieredPlace:
    """What outlives the processes that open it."""

    def __init__(self, folder: Path, empty_catalog: Path) -> None:
        self.mark = uuid.uuid4().hex
        self.url = f"memory://durable{self.mark}"
        self.stage_url = f"memory://stage{self.mark}"
        self.replica_urls = [f"memory://replica{number}{self.mark}" for number in range(2)]
        self.catalog_url = f"sqlite:///{folder}/catalog.sqlite"
        shutil.copy(empty_catalog, folder / "catalog.sqlite")
        self._processes: list[Process] = []

    def open(
        self,
        *,
        staged: bool = True,
        replicas: int = 0,
        stage: dict[str, Any] | None = None,
        durable_on: int = 1,
        bytes_max: int | None = None,
        bandwidth_max: int | None = None,
    ) -> Process:
        """``stage`` has options of the stage."""
        where = {"url": self.stage_url, **(stage or {})} if staged else None
        order = TierOrder(where, tuple(self.replica_urls[:replicas]), durable_on, bytes_max, bandwidth_max)
        self._processes.append(made := Process(self, order))
        return made

    def lose_stage(self) -> None:
        """As with its node."""
        MemoryBackend(self.stage_url.partition("://")[2]).forget()

    def objects(self, url: str) -> dict[str, bytes]:
        """What a tier holds below ``runs/``."""
        backend = MemoryBackend(url.partition("://")[2])
        return {info.key: backend.read(info.key, limit=1 << 30) for info in backend.list(layout.RUNS)}

    def names(self, url: str, key: str) -> set[str]:
        """Objects of one generation on a tier."""
        return {name.rpartition("/")[2] for name in self.objects(url) if f"/{key}/" in name}

    def forget(self) -> None:
        for process in self._processes:
            process.end()
        for url in (self.url, self.stage_url, *self.replica_urls):
            MemoryBackend(url.partition("://")[2]).forget()


def state_of(seed: int, numbers: int = 3000) -> dict[str, Any]:
    """A small state, made from ``seed`` alone."""
    rng = np.random.default_rng(seed)
    return {"w": rng.standard_normal(numbers), "b": rng.integers(-5, 5, size=17, dtype=np.int32), "n": [seed, "x"]}


def assert_state(found: Any, seed: int, numbers: int = 3000) -> None:
    wanted = state_of(seed, numbers)
    for name in ("w", "b"):
        assert found[name].tobytes() == wanted[name].tobytes(), name
    assert found["n"] == wanted["n"]


def of_pack(call: Call) -> bool:
    return call.key.endswith(".safetensors")


def named(text: str) -> Callable[[Call], bool]:
    return lambda call: text in call.key


def eventually(what: Callable[[], bool], seconds: float = 10.0) -> None:
    """Fail unless ``what`` becomes true in time."""
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.01)


def keys(rows: Sequence[GenerationRecord]) -> list[str]:
    return [row.key for row in rows]
