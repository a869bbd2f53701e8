"""Replicas: what they get and when, what proves them, and that they fail no save."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest
from tiers_rig import TieredPlace, assert_state, named, of_pack, state_of

import ckptfmt
from ckptfmt.backends.memory import MemoryBackend
from ckptfmt.engine import process as processes
from ckptfmt.engine import spread
from ckptfmt.engine.replicate import Pace, Source
from ckptfmt.engine.verdicts import read_commit
from ckptfmt.errors import AccessDenied, SaveFailed, Unavailable
from ckptfmt.format import layout
from ckptfmt.format.manifest import decode_manifest
from ckptfmt.format.part import decode_part
from ckptfmt.format.states import State
from ckptfmt.testing.crash_checks import command_line
from ckptfmt.testing.faults import Fault, Timing

PACK = layout.pack_name(0, 0)


@pytest.mark.parametrize("staged", [False, True])
def test_a_replica_opens_by_proof_when_all_else_is_lost(place: TieredPlace, staged: bool) -> None:
    process = place.open(staged=staged, replicas=2)
    with process.checkpointer() as checkpointer:
        for seed in (1, 2):
            checkpointer.save(state_of(seed), step=seed).result(10)  # type: ignore[union-attr]
    rows = process.rows()
    for tier, url in zip(process.replicas, place.replica_urls, strict=True):
        assert_state(ckptfmt.load(f"{url}#run", catalog="none"), 2)
        assert place.objects(url) == place.objects(place.url), "a replica holds the same objects under the same names"
        for row in rows:
            held = [found for found in process.site.sql().replicas(row.id) if found.tier == tier.uuid]
            assert [(found.pack, found.name) for found in held] == [(PACK, PACK)]
        assert process.site.sql().unreplicated("run", tier.uuid) == []


def test_packs_come_first_and_the_hint_last(place: TieredPlace) -> None:
    process = place.open(replicas=1)
    with process.checkpointer() as checkpointer:
        checkpointer.save(state_of(1), step=1).result(10)  # type: ignore[union-attr]
    made = [
        call.key.rpartition("/")[2]
        for call in process.replica().calls
        if call.op in ("create", "finish") and "/" in call.key
    ]
    (row,) = process.rows()
    assert made[:-1] == [PACK, layout.part_name(0), row.manifest_name, layout.COMMIT]
    assert layout.parse_commit_hint(made[-1]) is not None


@pytest.mark.parametrize("op", ["make_folder", "open_writer", "write_at", "finish", "create", "list"])
@pytest.mark.parametrize("times", [1, None])
def test_a_failing_replica_fails_no_save(
    place: TieredPlace, op: str, times: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    process = place.open(replicas=2)
    process.replica().add(Fault(op, error=lambda: AccessDenied("not yours"), times=times))
    with process.checkpointer() as checkpointer:
        assert_state(checkpointer.save(state_of(1), step=1).result(10).load(), 1)  # type: ignore[union-attr]
    assert "`ckptfmt replicate` catches up" in caplog.text
    assert [row.step for row in process.site.sql().unreplicated("run", process.replicas[0].uuid)] == [1]
    assert process.site.sql().unreplicated("run", process.replicas[1].uuid) == []
    assert layout.COMMIT not in place.names(place.replica_urls[0], process.rows()[0].key)


def test_a_slow_replica_holds_up_no_save(place: TieredPlace) -> None:
    process = place.open(replicas=1)
    held = process.replica().add(Fault("open_writer", hold=threading.Event(), when=of_pack))
    with process.checkpointer() as checkpointer:
        for seed in range(3):
            checkpointer.save(state_of(seed), step=seed).result(10)  # type: ignore[union-attr]
        assert held.reached.wait(10)
        assert place.objects(place.replica_urls[0]) == {}
        assert held.hold is not None
        held.hold.set()
    assert process.site.sql().unreplicated("run", process.replicas[0].uuid) == []


def test_closing_within_a_time_gives_replicas_up(place: TieredPlace, caplog: pytest.LogCaptureFixture) -> None:
    process = place.open(replicas=1)
    held = process.replica().add(Fault("write_at", hold=threading.Event(), when=of_pack))
    checkpointer = process.checkpointer()
    checkpointer.save(state_of(1), step=1).result(10)  # type: ignore[union-attr]
    assert held.reached.wait(10)
    checkpointer.close(timeout=0.2)
    assert "not waited for" in caplog.text
    assert held.hold is not None
    held.hold.set()


@pytest.mark.slow
def test_closing_gives_up_a_replica_that_hangs(place: TieredPlace, caplog: pytest.LogCaptureFixture) -> None:
    """As long as bytes move it is waited for; a mount whose server is gone may hang for ever."""
    process = place.open(replicas=1)
    held = process.replica().add(Fault("write_at", hold=threading.Event(), when=of_pack))
    checkpointer = process.checkpointer(commit_timeout=3)
    checkpointer.save(state_of(1), step=1).result(10)  # type: ignore[union-attr]
    assert held.reached.wait(10)
    closing = threading.Thread(target=checkpointer.close)
    closing.start()
    closing.join(20)
    hung = closing.is_alive()
    assert held.hold is not None
    held.hold.set()
    closing.join(20)
    assert not hung
    assert "not waited for" in caplog.text


def test_what_is_told_after_the_end_is_not_begun(place: TieredPlace) -> None:
    """A writer that hung, and whose verdict the watchdog gave, may come back after everything was closed."""
    process = place.open(replicas=1)
    checkpointer = process.checkpointer()
    checkpointer.save(state_of(1), step=1).result(10)  # type: ignore[union-attr]
    checkpointer.close()
    spreader, (row,) = checkpointer._context.spreader, process.rows()
    assert spreader is not None
    part = decode_part(place.objects(place.url)[f"runs/{row.run_key}/{row.key}/{layout.part_name(0)}"])
    calls = len(process.replica().calls)
    spreader.add(row, part, ())
    spreader.close(10)
    assert len(process.replica().calls) == calls


def test_what_a_dead_launch_left_half_is_made_anew(place: TieredPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "is_gone", lambda launch: True)
    process = place.open(replicas=1, durable_on=2)
    process.replica().add(Fault("write_at", error=process.die, timing="torn", when=of_pack))
    checkpointer = process.checkpointer()
    pending = checkpointer.save(state_of(1), step=1)
    assert pending is not None
    pending.exception(30)
    process = place.open(replicas=1, durable_on=2)
    process.repository.recover()
    (row,) = process.rows()
    assert row.state is State.COMMITTED
    store, replica = place.objects(place.url), place.objects(place.replica_urls[0])
    (key,) = (key for key in store if key.endswith(PACK))
    assert store[key] == replica[key]


# -- durable on more than one -----------------------------------------------------------------------
def test_a_save_waits_for_as_many_tiers_as_it_was_told(place: TieredPlace) -> None:
    process = place.open(replicas=2, durable_on=2)
    held = process.replica().add(Fault("finish", hold=threading.Event(), when=of_pack))
    with process.checkpointer() as checkpointer:
        pending = checkpointer.save(state_of(1), step=1)
        assert pending is not None
        assert held.reached.wait(10)
        assert process.rank().state == "staged"
        assert layout.part_name(0) not in place.names(place.url, process.rows()[0].key)
        assert held.hold is not None
        held.hold.set()
        assert_state(pending.result(10).load(), 1)
    (row,) = process.rows()
    uuid = process.replicas[0].uuid
    assert row.tiers == (uuid,)
    assert row.manifest_name is not None
    objects = place.objects(place.url)
    folder = f"runs/{row.run_key}/{row.key}"
    assert decode_manifest(objects[f"{folder}/{row.manifest_name}"]).tiers == [uuid]
    commit = read_commit(process.backend, folder)
    assert commit is not None
    assert commit.tiers == (uuid,)
    assert sum(call.op == "write_at" for call in process.replica().calls) == 1, "packs are copied once"


@pytest.mark.parametrize("staged", [False, True])
def test_a_save_fails_where_a_tier_that_it_needs_fails(place: TieredPlace, staged: bool) -> None:
    process = place.open(staged=staged, replicas=1, durable_on=2)
    process.replica().add(Fault("open_writer", error=lambda: AccessDenied("not yours"), when=of_pack))
    with process.checkpointer() as checkpointer:
        pending = checkpointer.save(state_of(1), step=1)
        assert pending is not None
        error = pending.exception(20)
        assert isinstance(error, SaveFailed)
        assert isinstance(error.__cause__, AccessDenied)
        assert_state(checkpointer.save(state_of(2), step=2).result(10).load(), 2)  # type: ignore[union-attr]


@pytest.mark.parametrize(("op", "timing"), [("make_folder", "before"), ("make_folder", "after"), ("write_at", "torn")])
def test_a_passing_failure_is_repeated_under_the_same_name(place: TieredPlace, op: str, timing: Timing) -> None:
    process = place.open(replicas=1, durable_on=2)
    process.replica().add(Fault(op, error=lambda: Unavailable("lost"), timing=timing, when=named("runs/")))
    with process.checkpointer() as checkpointer:
        checkpointer.save(state_of(1), step=1).result(10)  # type: ignore[union-attr]
    assert PACK in place.names(place.replica_urls[0], process.rows()[0].key)


def test_a_source_that_is_gone_gives_way_to_the_next(place: TieredPlace) -> None:
    """The stage is lost after the commit: the replica is fed from the durable tier."""
    process = place.open(replicas=1)
    held = process.replica().add(Fault("make_folder", hold=threading.Event(), when=named("runs/")))
    with process.checkpointer() as checkpointer:
        checkpointer.save(state_of(1), step=1).result(10)  # type: ignore[union-attr]
        assert held.reached.wait(10)
        place.lose_stage()
        assert held.hold is not None
        held.hold.set()
    assert_state(ckptfmt.load(f"{place.replica_urls[0]}#run", catalog="none"), 1)


def test_a_replica_is_never_written_to_as_a_repository(place: TieredPlace, caplog: pytest.LogCaptureFixture) -> None:
    process = place.open(replicas=1)
    with caplog.at_level(logging.WARNING), process.checkpointer() as checkpointer:
        checkpointer.save(state_of(1), step=1).result(10)  # type: ignore[union-attr]
    with pytest.raises(ckptfmt.Conflict, match="is the replica of a repository that is elsewhere"):
        ckptfmt.open(place.replica_urls[0], catalog=place.catalog_url)


def test_a_replica_is_adopted_when_the_original_is_lost(tmp_path: Path) -> None:
    root, copy = tmp_path / "r", tmp_path / "copy"
    with ckptfmt.open(root, replicas=[copy]) as repository, repository.checkpointer("run") as checkpointer:
        checkpointer.save(state_of(1), step=1).result(20)  # type: ignore[union-attr]
    root.rename(tmp_path / "lost")
    code, text = command_line("db", "adopt", str(copy))
    assert code == 0, text
    with ckptfmt.open(copy) as repository, repository.checkpointer("run") as checkpointer:
        into = dict.fromkeys(state_of(0))
        checkpointer.restore(into, strict=False)
        assert_state(into, 1)
        checkpointer.save(state_of(2), step=2).result(20)  # type: ignore[union-attr]
    (tmp_path / "lost").rename(root)
    with pytest.raises(ckptfmt.Conflict, match="it was adopted"):
        ckptfmt.open(root, replicas=[copy])


@pytest.mark.parametrize("what", ["part", "manifest"])
def test_what_proves_a_generation_is_compared_on_its_way(place: TieredPlace, what: str) -> None:
    """Read wrongly once, after whoever copies has read the manifest himself."""
    process = place.open(replicas=1)
    process.replica().add(Fault("make_folder", error=lambda: AccessDenied("not yet"), when=named("runs/")))
    with process.checkpointer() as checkpointer:
        generation = checkpointer.save(state_of(1), step=1).result(10)  # type: ignore[union-attr]
    (row,), tier = process.rows(), process.replicas[0]
    assert row.manifest_name is not None
    manifest = generation._opened.manifest
    spread.copy_packs(row, manifest, tier, [Source(process.backend)], Pace())
    name = layout.part_name(0) if what == "part" else row.manifest_name
    objects = MemoryBackend(place.url.partition("://")[2])._store.objects
    objects[f"runs/{row.run_key}/{row.key}/{name}"][40] ^= 1
    if what == "manifest":
        with pytest.raises(ckptfmt.Corrupt, match="manifest"):
            spread.copy_verdict(process.site, row, manifest, tier)
        assert layout.COMMIT not in place.names(place.replica_urls[0], row.key)
    else:
        spread.copy_verdict(process.site, row, manifest, tier)
        assert layout.COMMIT in place.names(place.replica_urls[0], row.key)
    assert name not in place.names(place.replica_urls[0], row.key)
