"""A save to a place where every request waits for a round trip keeps several under way."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reading_rig import Watched

import ckptfmt
from ckptfmt import connect
from ckptfmt.ports.backend import Buffer, ObjectWriter

TOGETHER = 6


@pytest.mark.slow
def test_many_units_of_a_pack_are_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gathered, numbers = threading.Barrier(TOGETHER), itertools.count(1)
    plain = connect.backend_for

    class Writer:
        def __init__(self, inner: ObjectWriter) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def write_at(self, offset: int, data: Buffer) -> None:
            if next(numbers) <= TOGETHER:
                gathered.wait(timeout=60)
            self._inner.write_at(offset, data)

    class Distant(Watched):
        def open_writer(self, key: str, nbytes: int) -> Writer:
            return Writer(self._inner.open_writer(key, nbytes))

    def backend_for(*given: Any, **options: Any) -> Distant:
        return Distant(plain(*given, **options), distant=True)

    saved = np.random.default_rng(1).integers(0, 255, 80 << 20, np.uint8)
    with monkeypatch.context() as patched:
        patched.setattr(connect, "backend_for", backend_for)
        ckptfmt.save({"w": saved}, tmp_path / "r", run="run")
    assert next(numbers) > TOGETHER
    np.testing.assert_array_equal(ckptfmt.load(tmp_path / "r", run="run")["w"], saved)
