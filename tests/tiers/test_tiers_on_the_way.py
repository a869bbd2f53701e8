"""Bytes that were damaged on their way are read again, whatever they are of; what stays damaged is a typed error."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from reading_rig import Places, blank, places, same
from tiers_rig import Process, TieredPlace, assert_state, named, state_of

import ckptfmt
from ckptfmt.backends.posix import PosixBackend
from ckptfmt.engine import governing, marker, tier_marks
from ckptfmt.engine import process as processes
from ckptfmt.engine.keep import gc
from ckptfmt.engine.rereading import RETRIES
from ckptfmt.errors import Corrupt, FormatError
from ckptfmt.format import layout
from ckptfmt.ports.backend import Backend
from ckptfmt.testing.faults import Fault
from ckptfmt.views.box_bytes import VerifiedBytes


class Line:
    """A backend behind a bad line: a bit of what is read first, by object and range, arrives wrong, ``times`` times."""

    def __init__(self, inner: Backend, *, times: int = 1, when: Callable[[str], bool] = lambda key: True) -> None:
        self._inner = inner
        self._times = times
        self._when = when
        self._lock = threading.Lock()
        self.asked: Counter[tuple[str, int, int]] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _is_bad(self, key: str, offset: int, nbytes: int) -> bool:
        with self._lock:
            self.asked[key, offset, nbytes] += 1
            return self._when(key) and self.asked[key, offset, nbytes] <= self._times

    def read(self, key: str, *, limit: int) -> bytes:
        data = bytearray(self._inner.read(key, limit=limit))
        if data and self._is_bad(key, 0, len(data)):
            data[len(data) // 2] ^= 1
        return bytes(data)

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        self._inner.read_into(key, offset, buffer)
        if self._is_bad(key, offset, len(buffer)):
            buffer[len(buffer) // 2] ^= 1

    def map_cached(self, key: str, offset: int, memory: memoryview) -> None:
        return None


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Places]:
    made = places(tmp_path, stage=False, replicas=0)
    yield made
    made.close()


def _behind(process: Process) -> None:
    """From now on each place of ``process`` is behind a bad line."""
    for backend in process.storage:
        backend._inner = Line(backend._inner)  # type: ignore[misc]


# -- reading ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("catalog", [None, "none"])
def test_every_first_answer_is_damaged_and_all_is_read(
    here: Places, catalog: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    here.wrapped[here.durable] = Line
    with caplog.at_level(logging.WARNING, "ckptfmt"):
        generation = here.generation(catalog=catalog)
    assert [record.getMessage() for record in caplog.records if "read once more" in record.getMessage()]
    same(generation.load(), here.saved)
    report = generation.restore(live := blank())
    same(live, here.saved)
    assert report.damaged == ()
    assert generation.verify().ok


def test_chunks_shown_to_other_tools_are_read_again(here: Places) -> None:
    here.wrapped[here.durable] = Line
    opened = here.generation()._opened
    shown = VerifiedBytes(opened)
    for name, value in here.saved.items():
        (box,) = opened.stored.find(name, None).boxes
        assert bytes(shown.read(box, 0, box.nbytes)) == value.tobytes()


KINDS = [layout.COMMIT, "manifest-", ".safetensors"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_stays_damaged_is_told_by_name_and_not_read_for_ever(here: Places, kind: str) -> None:
    lines: list[Line] = []

    def line(plain: Backend) -> Line:
        lines.append(Line(plain, times=1000, when=lambda key: kind in key))
        return lines[-1]

    here.wrapped[here.durable] = line
    with pytest.raises(Corrupt, match=kind) as caught:
        here.generation(catalog="none")["small"][:]
    assert caught.value.object is not None
    assert kind in caught.value.object
    assert sum(times for (key, *_), times in lines[-1].asked.items() if kind in key) == 1 + RETRIES


def test_what_a_root_says_of_itself_is_read_again(tmp_path: Path) -> None:
    ckptfmt.open(tmp_path / "r", replicas=[tmp_path / "copy"]).close()
    for root in (tmp_path / "r", tmp_path / "copy"):
        plain = PosixBackend(root)
        for read in (marker.read_marker, governing.governing_claim, tier_marks.read_mark):
            assert read(Line(plain)) == read(plain)  # type: ignore[operator, arg-type]
    with pytest.raises(FormatError, match=layout.MARKER):
        marker.read_marker(Line(PosixBackend(tmp_path / "r"), times=1000))  # type: ignore[arg-type]


# -- saving, copying, settling ---------------------------------------------------------------------------
@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("durable_on", [1, 2])
def test_a_save_commits_and_its_replica_gets_good_bytes(place: TieredPlace, staged: bool, durable_on: int) -> None:
    process = place.open(staged=staged, replicas=1, durable_on=durable_on)
    _behind(process)
    with process.checkpointer() as checkpointer:
        for seed in (1, 2):
            assert_state(checkpointer.save(state_of(seed), step=seed).result(10).load(), seed)  # type: ignore[union-attr]
    assert place.objects(place.replica_urls[0]) == place.objects(place.url)
    assert_state(ckptfmt.load(f"{place.replica_urls[0]}#run", catalog="none"), 2)
    assert process.site.sql().unreplicated("run", process.replicas[0].uuid) == []


@pytest.mark.parametrize("name", ["r00000-p000", layout.part_name(0), "manifest-", layout.COMMIT])
def test_what_a_killed_launch_had_staged_or_stored_is_settled(
    place: TieredPlace, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of a generation is given up for one wrong answer."""
    monkeypatch.setattr(processes, "is_gone", lambda launch: True)
    process = place.open()
    process.backend.add(Fault(error=process.die, timing="after", when=lambda call: call.mutates and name in call.key))
    pending = process.checkpointer().save(state_of(1), step=1)
    assert pending is not None
    pending.exception(30)
    assert process.dead
    process = place.open()
    _behind(process)
    process.repository.recover()
    assert_state(process.repository.latest("run").load(), 1)


def test_gc_goes_by_what_is_stored(place: TieredPlace) -> None:
    process = place.open(replicas=1)
    with process.checkpointer() as checkpointer:
        for seed in (1, 2):
            checkpointer.save(state_of(seed), step=seed).result(10)  # type: ignore[union-attr]
    first, second = process.rows()
    gc.retire(process.site, first.id)
    _behind(process)
    done = gc.collect(process.site, dry_run=False, grace=gc.GRACE * 0)
    assert done.damaged == ()
    gone = {layout.COMMIT, layout.RETIRED}
    assert place.names(place.url, first.key) == place.names(place.replica_urls[0], first.key) == gone
    assert len(place.names(place.url, second.key)) == len(place.names(place.replica_urls[0], second.key)) == 4


def test_a_line_that_stays_bad_fails_the_copy_and_the_catalog_says_so(
    place: TieredPlace, caplog: pytest.LogCaptureFixture
) -> None:
    process = place.open(staged=False, replicas=1)
    process.backend._inner = Line(process.backend._inner, times=1000, when=lambda key: key.endswith(".safetensors"))  # type: ignore[misc]
    with process.checkpointer() as checkpointer:
        checkpointer.save(state_of(1), step=1).result(10)  # type: ignore[union-attr]
    assert "`ckptfmt replicate` catches up" in caplog.text
    assert [row.step for row in process.site.sql().unreplicated("run", process.replicas[0].uuid)] == [1]
    assert not any(named(".safetensors")(call) for call in process.replica().calls if call.op == "finish")
