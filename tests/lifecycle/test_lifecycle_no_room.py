"""A catalog that cannot be written to: restores go on, saves fail at once, verdicts are waited for."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from error_chain import chain_of
from lifecycle_rig import Place, Process, assert_state, named, state_of

from ckptfmt.errors import CatalogError, OutcomeUnknown, OutOfSpace, SaveFailed, Unavailable
from ckptfmt.ports.catalog import UNWRITABLE
from ckptfmt.testing.faults import Call, Fault


def _refusing(kind: str) -> Any:
    return lambda: CatalogError("the catalog has no room: free some", kind=kind)


full = _refusing("catalog_full")


def _saved(place: Place) -> Process:
    process = place.open()
    with process.checkpointer() as checkpointer:
        checkpointer.save(state_of(1), step=1)
    return process


# -- reading ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", sorted(UNWRITABLE))
def test_who_cannot_be_registered_reads_all_the_same(place: Place, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    process = _saved(place)
    process.catalog.add(Fault("open_reader", error=_refusing(kind), times=None))
    generation = process.repository.latest()
    with caplog.at_level(logging.WARNING):
        assert_state(generation.load(), 1)
        live = dict.fromkeys(state_of(0))
        generation.restore(live, strict=False)
        assert generation.verify().ok
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1, told
    assert "the grace between retirement and deletion" in told[0]
    assert told[0].endswith("no room: free some")


def test_a_checkpointer_restores_on_a_disk_that_became_full(place: Place) -> None:
    process = _saved(place)
    with process.checkpointer() as checkpointer:
        process.catalog.add(Fault("open_reader", error=full, times=None))
        live = state_of(5)
        report = checkpointer.restore(live)
    assert report is not None
    assert_state(live, 1)


def test_another_refusal_of_the_catalog_stays_an_error(place: Place) -> None:
    process = _saved(place)
    process.catalog.add(Fault("open_reader", error=_refusing("catalog_rule"), times=None))
    with pytest.raises(CatalogError, match="no room"):
        process.repository.latest().load()


def test_what_was_read_is_returned_though_the_reader_cannot_be_forgotten(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    process = _saved(place)
    process.catalog.add(Fault("close_reader", error=full))
    assert_state(process.repository.latest().load(), 1)
    assert "stays registered" in caplog.text
    process.catalog.add(Fault("close_reader", error=full))
    process.backend.add(Fault("read_into", error=lambda: Unavailable("the server is away"), times=None))
    with pytest.raises(Unavailable, match="away"):  # not masked
        process.repository.latest().load()


# -- saving -----------------------------------------------------------------------------------------
def test_no_launch_begins_but_the_error_says_how_to_read(place: Place) -> None:
    process = _saved(place)
    process.catalog.add(Fault("acquire_launch", error=full, times=None))
    began = time.monotonic()
    with pytest.raises(CatalogError) as caught:
        process.checkpointer("run")
    assert time.monotonic() - began < 1
    assert caught.value.kind == "catalog_full"
    for words in ("run 'run'", "no room", f"ckptfmt.restore(state, \"{place.url}\", run='run')", 'mode="r"'):
        assert words in str(caught.value)
    assert_state(process.repository.latest().load(), 1)


def test_a_save_that_cannot_begin_fails_at_once(place: Place) -> None:
    """FR-100: not after its whole time, and not as something of which nobody knows the outcome."""
    process = place.open(sql=[Fault("begin_save", error=full, times=None)])
    checkpointer = process.checkpointer(commit_timeout=600.0)
    pending = checkpointer.save(state_of(1), step=1)
    assert pending is not None
    error = pending.exception(timeout=1)
    assert isinstance(error, SaveFailed)
    assert not isinstance(error, OutcomeUnknown)
    assert "could not begin" in str(error)
    assert str(error).endswith("no room: free some")
    assert [type(cause) for cause in chain_of(error)] == [SaveFailed, CatalogError]
    assert process.rows() == []


def test_a_verdict_is_waited_for_until_there_is_room(place: Place) -> None:
    """The disk fills up under a save, and with it the catalog; then somebody frees a little."""
    storage = Fault(
        "create", error=lambda: OutOfSpace("no room for the part", needed=7, free=0), when=named("part.json")
    )
    process = place.open(storage, sql=[Fault("abort", error=full, times=3)])
    checkpointer = process.checkpointer()
    pending = checkpointer.save(state_of(1), step=1)
    assert pending is not None
    error = pending.exception(timeout=10)
    assert isinstance(error, SaveFailed)
    assert not isinstance(error, OutcomeUnknown)
    assert "no room for the part" in str(error)
    assert process.catalog.counts["abort"] == 4
    assert process.row().abort_reason == "OutOfSpace: no room for the part"


def test_another_refusal_of_a_verdict_is_not_waited_for(place: Place) -> None:
    storage = Fault("create", error=lambda: OutOfSpace("no room for the part"), when=named("part.json"))
    process = place.open(storage, sql=[Fault("abort", error=_refusing("catalog_rule"), times=None)])
    checkpointer = process.checkpointer()
    pending = checkpointer.save(state_of(1), step=1)
    assert pending is not None
    assert isinstance(pending.exception(timeout=5), OutcomeUnknown)
    assert process.catalog.counts["abort"] == 1


# -- what was tried until the end ---------------------------------------------------------------------
def _second(suffix: str) -> Callable[[Call], bool]:
    """Condition of a fault: the second call for such a key."""
    seen: list[str] = []

    def is_second(call: Call) -> bool:
        seen.extend([call.key] * call.key.endswith(suffix))
        return call.key.endswith(suffix) and len(seen) == 2

    return is_second


def _hung_after_an_error(place: Place, op: str, suffix: str, failing: str) -> SaveFailed:
    """The error of a save whose writer fails once, tries again, and hangs until the deadline."""
    process = place.open(
        Fault(op, hold=threading.Event(), when=_second(suffix)),
        Fault(failing, error=lambda: Unavailable("the server is away"), when=named(suffix)),
    )
    pending = process.checkpointer(commit_timeout=0.8).save(state_of(1), step=1)
    assert pending is not None
    error = pending.exception(timeout=10)
    assert isinstance(error, SaveFailed)
    assert "not committed within 0.8 s (stage persist" in str(error)
    return error


@pytest.mark.parametrize(
    ("op", "suffix", "failing"),
    [("create", ".part.json", "create"), ("open_writer", ".safetensors", "finish")],
)
def test_a_save_that_is_out_of_time_tells_what_it_was_trying(place: Place, op: str, suffix: str, failing: str) -> None:
    error = _hung_after_an_error(place, op, suffix, failing)
    assert str(error).endswith("; the last error: the server is away")
    assert [type(cause) for cause in chain_of(error)] == [SaveFailed, Unavailable]
