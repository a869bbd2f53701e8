"""What is done where the usual way is shut: no thread, a limit and damage at once, an answer that never comes."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from error_chain import chain_of
from lifecycle_rig import Place, Process, state_of

from ckptfmt import connect
from ckptfmt.catalog.sql import SqlCatalog
from ckptfmt.engine import plan as plans
from ckptfmt.engine import units
from ckptfmt.errors import CatalogError, Corrupt, SaveFailed

NUMBERS = 100_000


def damage(process: Process, key: str) -> None:
    """Change the last byte of an object."""
    backend = process.backend._inner
    size = backend.head(key).nbytes
    data = bytearray(backend.read(key, limit=size))
    data[-1] ^= 1
    backend.delete(key)
    writer = backend.open_writer(key, size)
    writer.write_at(0, data)
    writer.finish()


def test_without_a_thread_the_arena_is_not_touched_ahead(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refused(self: threading.Thread) -> None:
        if self.name == "ckptfmt-prepare":
            raise RuntimeError("can't start new thread")
        start(self)

    with place.open().checkpointer() as checkpointer:
        monkeypatch.setattr(threading.Thread, "start", refused)
        checkpointer.prepare(state_of(1))
        checkpointer.save(state_of(1), step=1)
        checkpointer.wait()
        assert checkpointer.restore(state_of(0)) is not None
        checkpointer.save(state_of(2), step=2)
    assert place.open().catalog.live_launch("run") is None


def test_a_fallback_under_a_limit_mixes_no_generations(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes through the window cannot be taken back: a damaged generation must not get that far."""
    monkeypatch.setattr(plans, "HOST_BYTES_MIN", 1 << 16)
    monkeypatch.setattr(plans, "WINDOW_BYTES", 1 << 16)
    monkeypatch.setattr(units, "IO_BYTES", 1 << 13)
    process = place.open()
    with process.checkpointer() as checkpointer:
        checkpointer.save({"b": np.full(NUMBERS, 1.0)}, step=1)
        checkpointer.save({"a": np.full(NUMBERS, 2.0), "b": np.full(NUMBERS, 2.0)}, step=2)
    row = process.row()
    damage(process, f"runs/{row.run_key}/{row.key}/r00000-p000.safetensors")
    into: dict[str, Any] = {"a": np.zeros(NUMBERS), "b": np.zeros(NUMBERS)}
    with place.open().checkpointer(host_bytes_max=8 * NUMBERS) as checkpointer:
        report = checkpointer.restore(into, strict=False, fallback=True)
        assert report is not None
        assert report.fell_back_from == (row.id,)
        assert report.missing == ("a",)
        assert not into["a"].any()
        assert (into["b"] == 1.0).all()
        with pytest.raises(Corrupt, match="tensor 'b'"):
            checkpointer.restore(into, at=row.id)


@pytest.mark.parametrize("call", ["generations", "commit"])
def test_out_of_time_behind_the_catalog_tells_what_it_was_trying(
    place: Place, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    process = place.open()
    hold, calls = threading.Event(), 0
    checkpointer = process.checkpointer(commit_timeout=0.8)
    usual = getattr(SqlCatalog, call)

    def hung(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        if threading.current_thread().name.startswith("ckptfmt-save"):
            calls += 1
            if calls == 1:
                raise CatalogError("the catalog is away", transient=True)
            hold.wait()
        return usual(self, *args, **kwargs)

    monkeypatch.setattr(SqlCatalog, call, hung)
    try:
        pending = checkpointer.save(state_of(1), step=1)
        assert pending is not None
        error = pending.exception(timeout=10)
        assert isinstance(error, SaveFailed)
        assert "; the last error: the catalog is away" in str(error)
        assert any(isinstance(cause, CatalogError) for cause in chain_of(error))
    finally:
        hold.set()


def test_array_families_are_one_of_each_for_the_process() -> None:
    """A device has one side stream for all copies, and types are looked up once."""
    assert connect.live_families() is connect.live_families()
