"""A save to a place where every request waits for a round trip keeps several under way, each as large as it likes."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reading_rig import Watched

import ckptfmt
from ckptfmt import connect
from ckptfmt.engine import transfer, units
from ckptfmt.engine.save import persist
from ckptfmt.ports.backend import Buffer, ObjectWriter, Traits

UNIT = 1 << 16
WRITE_BYTES = 4 * UNIT
Wrote = Callable[[int, int], None]


@pytest.fixture
def save_distant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Save an array to a distant place and compare what comes back; ``wrote`` is told offset and bytes of each write
    before it."""
    plain = connect.backend_for

    def save(nbytes: int, wrote: Wrote) -> None:
        class Writer:
            def __init__(self, inner: ObjectWriter, write_bytes: int) -> None:
                self._inner, self._write_bytes = inner, write_bytes

            def __getattr__(self, name: str) -> Any:
                return getattr(self._inner, name)

            def write_at(self, offset: int, data: Buffer) -> None:
                assert not offset % self._write_bytes  # as it was announced
                wrote(offset, len(data))
                self._inner.write_at(offset, data)

        class Distant(Watched):
            @property
            def traits(self) -> Traits:
                return replace(super().traits, write_bytes=WRITE_BYTES)

            def open_writer(self, key: str, nbytes: int, *, write_bytes: int = 0) -> Writer:
                return Writer(self._inner.open_writer(key, nbytes, write_bytes=write_bytes), write_bytes)

        saved = np.random.default_rng(1).integers(0, 255, nbytes, np.uint8)
        with monkeypatch.context() as patched:
            patched.setattr(connect, "backend_for", lambda *given, **more: Distant(plain(*given, **more), distant=True))
            ckptfmt.save({"w": saved}, tmp_path / "r", run="run")
        np.testing.assert_array_equal(ckptfmt.load(tmp_path / "r", run="run")["w"], saved)

    return save


@pytest.mark.slow
def test_many_units_of_a_pack_are_under_way(save_distant: Callable[..., None]) -> None:
    together = transfer.distant_thread_count()
    gathered, numbers = threading.Barrier(together), itertools.count(1)

    def wrote(offset: int, nbytes: int) -> None:
        if next(numbers) <= together:
            gathered.wait(timeout=60)

    save_distant((together + 2) * units.IO_BYTES, wrote)
    assert next(numbers) > together


def test_what_is_held_is_written_in_the_pieces_that_the_place_takes(
    save_distant: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(units, "IO_BYTES", UNIT)
    writes: list[tuple[int, int]] = []
    save_distant(20 * UNIT + 12, lambda offset, nbytes: writes.append((offset, nbytes)))
    writes.sort()
    assert [offset for offset, _ in writes] == [number * WRITE_BYTES for number in range(6)]
    assert {nbytes for _, nbytes in writes[:-1]} == {WRITE_BYTES}


def test_more_of_a_large_pack_is_written_at_once(
    save_distant: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(units, "IO_BYTES", UNIT)
    monkeypatch.setattr(persist, "_WRITE_BYTES", 16 * UNIT)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(2))
    # the power of two up to a quarter of what each of four threads writes
    for nbytes, each in ((63, 4), (127, 4), (129, 8), (250, 8), (300, 16), (600, 16)):
        writes: list[tuple[int, int]] = []
        save_distant(nbytes * UNIT, lambda offset, count: writes.append((offset, count)))  # noqa: B023
        writes.sort()
        assert {count for _, count in writes[:-1]} == {each * UNIT}


@pytest.mark.parametrize(("cores", "threads"), [(1, 4), (2, 4), (4, 8), (6, 12), (96, 16)])
def test_connections_follow_the_cores(cores: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(cores))
    assert transfer.distant_thread_count() == threads
