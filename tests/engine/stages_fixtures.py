"""States saved in stages at small sizes, and a stand-in for the session that writes them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest

from ckptfmt.engine import plan as plans
from ckptfmt.engine import units
from ckptfmt.engine.arena import Arena
from ckptfmt.engine.families import Families
from ckptfmt.engine.save.persist import Written, write_packs
from ckptfmt.engine.save.snapshot import Planner, Snapshot, take_snapshot
from ckptfmt.errors import CkptError
from ckptfmt.format import checksum
from ckptfmt.ports.backend import Backend

UNIT: Final = 1 << 16
"""Bytes of a unit and of a chunk here."""
WINDOW: Final = 8 * UNIT

FOLDER: Final = "f"


def make_small(patch: pytest.MonkeyPatch) -> None:
    """Everything that is 8 MiB elsewhere becomes 64 KiB."""
    patch.setattr(units, "IO_BYTES", UNIT)
    patch.setattr(checksum, "CHUNK_BYTES", UNIT)
    patch.setattr(plans, "WINDOW_BYTES", WINDOW)
    patch.setattr(plans, "HOST_BYTES_MIN", WINDOW)
    patch.setattr(plans, "HASH_WINDOW_BYTES", WINDOW)


class Writing:
    """``write_packs`` on a thread of its own, as in a session."""

    def __init__(self, backend: Backend, snapshot: Snapshot, give_up: Callable[[], None] = lambda: None) -> None:
        self.written: Written | None = None
        self.error: BaseException | None = None
        self._backend, self._snapshot, self._give_up = backend, snapshot, give_up
        self._thread = threading.Thread(target=self._run)
        # A test in which both sides wait for each other fails, rather than never to end.
        self._rescued = False
        self._rescue = threading.Timer(15, self._end)
        self._rescue.daemon = True
        self._rescue.start()
        self._thread.start()

    def _run(self) -> None:
        try:
            self.written = write_packs(
                self._backend, FOLDER, 0, self._snapshot, give_up=self._give_up, passing=lambda error: None
            )
        except BaseException as error:
            self.error = error

    def join(self) -> None:
        self._thread.join(30)
        self._rescue.cancel()
        assert not self._thread.is_alive(), "the writer hangs"
        assert not self._rescued, "both sides wait for each other"

    def _end(self) -> None:
        self._rescued = True
        self._snapshot.drop(CkptError("this test hangs"))


def snapshot_of(
    state: Any, families: Families, *, sync: Any = None, host_bytes_max: int | None = None, arena: Arena | None = None
) -> Snapshot:
    return take_snapshot(
        state,
        None,
        families=families,
        planner=Planner(),
        arena=arena or Arena(),
        sync=sync,
        host_bytes_max=host_bytes_max,
    )


def save(backend: Backend, snapshot: Snapshot) -> Written:
    """Freeze and write; raises the writer's error."""
    writing = Writing(backend, snapshot)
    try:
        snapshot.freeze()
    except CkptError:
        writing.join()
        if writing.error is None:
            raise
    writing.join()
    if writing.error is not None:
        raise writing.error
    assert writing.written is not None
    return writing.written


def stored(backend: Backend, snapshot: Snapshot, written: Written) -> dict[str, bytes]:
    """What the packs hold, by tensor; checks headers and digests."""
    found = {}
    for planned, pack in zip(snapshot.plan.packs, written.packs, strict=True):
        data = backend.read(f"{FOLDER}/{pack.name}", limit=1 << 30)
        assert len(data) == planned.nbytes
        assert data[: len(planned.header)] == planned.header
        for leaf, offset in zip(planned.leaves, planned.offsets, strict=True):
            name, spec = snapshot.names_and_specs[leaf]
            found[name] = data[offset : offset + spec.nbytes]
            chunks = checksum.chunk_spans(spec.nbytes, checksum.CHUNK_BYTES)
            assert written.digests[leaf] == [checksum.digest(found[name][at : at + n]) for at, n in chunks]
    return found


def bytes_of(value: Any) -> bytes:
    """The bytes that a value is stored as."""
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if isinstance(value, np.ndarray):
        return value.astype(value.dtype.newbyteorder("<")).tobytes()
    import torch

    flat = torch.empty(value.numel(), dtype=value.dtype)
    flat.view(value.shape).copy_(value)
    return flat.view(torch.uint8).numpy().tobytes()
