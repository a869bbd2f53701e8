"""What users met elsewhere with copies, deletions and disks does not happen here, where there are tiers.

C: the wrong thing is deleted

| case | what users met | tests |
| --- | --- | --- |
| FR-026 | keeping one, or none, deletes everything | test_the_last_commits_stay, test_what_cannot_be_meant_is_refused, test_the_last_proven_generation_of_a_run_never_goes |
| FR-027 | the last by text order of names | test_fr027_the_last_commits_are_kept_whatever_their_steps |
| FR-028 | protecting the best deletes the latest | test_retire_refuses_what_somebody_needs, test_fr028_the_best_and_the_latest_stay_on_every_tier |
| FR-029 | a resumed run cleans up what it came from | test_fr029_a_run_frees_nothing_of_another |
| FR-030 | the highest step is taken for the latest | test_fr030_after_a_rollback_the_later_commit_is_kept |
| FR-032 | garbage is collected beside a writer that was stopped | test_fr032_a_writer_stopped_anywhere_loses_nothing_to_gc, test_gc_leaves_a_save_in_flight_alone, test_gc_under_a_launch_that_was_overtaken_makes_its_save_fail_cleanly, test_leftovers_of_unfinished_creates_go_only_when_no_launch_lives |
| FR-033 | what two refer to goes with the first of them | test_fr033_what_another_refers_to_stays_on_every_tier, test_packs_that_another_generation_refers_to_stay_until_it_goes |
| FR-034 | one place spelled in two ways | test_fr034_however_tiers_are_spelled_nothing_of_them_is_a_candidate, test_however_a_root_is_spelled_nothing_of_it_is_a_candidate |
| FR-036 | deletes beside the prefix | test_fr036_nothing_beside_a_tier_is_touched, test_list_respects_path_boundaries, test_delete_removes_one_object |
| FR-037 | something that is gone already stops the cleaning | test_fr037_what_was_removed_by_hand_counts_as_gone, test_something_removed_by_hand_counts_as_gone |
| FR-038 | what is kept is forgotten by a restart | test_fr038_restarts_keep_no_more, test_the_next_launch_frees_what_the_last_one_left, test_the_upload_of_a_killed_process_is_swept |

No rule retires generations by itself yet: of FR-026 to FR-030 and FR-038 this is what a stage keeps, and what ``retire``
refuses. Metrics (FR-028) are nobody's but the user's, who tags.

I: network file systems and object stores; what test_object_field.py does not have

| case | what users met | tests |
| --- | --- | --- |
| FR-089 | one wrong answer ends a job; a copy is missing unseen | test_every_first_answer_is_damaged_and_all_is_read, test_a_save_commits_and_its_replica_gets_good_bytes, test_what_a_killed_launch_had_staged_or_stored_is_settled, test_what_stays_damaged_is_told_by_name_and_not_read_for_ever, test_a_line_that_stays_bad_fails_the_copy_and_the_catalog_says_so, test_a_failing_replica_fails_no_save |
| FR-096 | a commit that has to rename or change modes | test_a_life_without_links_renames_and_modes, test_a_kill_within_an_object_shows_nothing_and_is_healed, test_a_gc_killed_within_a_verdict_is_finished_by_the_next |
| FR-097 | stale handles | test_a_stale_handle_is_opened_anew_a_few_times, test_an_input_error_is_tried_once_more_where_it_may_mean_a_stale_handle, test_looks_and_deletes_survive_a_stale_folder |

J: local disks

| case | what users met | tests |
| --- | --- | --- |
| FR-098 | recorded before it is synced | test_fr098_every_tier_is_synced_before_the_catalog_says_so, test_what_a_killed_writer_had_not_synced_is_synced_before_it_counts, test_finish_cuts_then_syncs_the_file_then_the_folder, test_a_sample_of_cuts |
| FR-099 | one passing error ends a run | test_a_copy_that_fails_is_made_again_under_a_new_name, test_a_passing_failure_is_repeated_under_the_same_name, test_a_save_is_not_lost_for_want_of_a_stage, test_one_error_on_a_pack_costs_a_new_pack |
| FR-100 | a full disk is not named, and stays full | test_fr100_a_full_replica_is_named_and_what_was_begun_is_removed, test_a_save_is_not_lost_for_want_of_a_stage, test_a_save_that_passes_the_limit_is_refused_before_it_writes, test_wherever_the_space_ends |
| FR-101 | a place that is forbidden is found out at the end | test_fr101_a_forbidden_tier_is_told_at_opening, test_a_forbidden_root_is_told_at_opening |
"""  # noqa: E501

from __future__ import annotations

import dataclasses
import logging
import os
import stat
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from field_cases import assert_every_case_has_tests
from forked import in_child, open_to_others
from tiers_rig import Process, TieredPlace, assert_state, named, of_pack, state_of

import ckptfmt
from ckptfmt.backends.memory import MemoryBackend
from ckptfmt.engine.keep import gc
from ckptfmt.errors import AccessDenied, Conflict, OutOfSpace
from ckptfmt.format import layout
from ckptfmt.ports.records import GenerationRecord, PackRecord
from ckptfmt.testing.faults import Fault

NOW = timedelta(0)
PACK = layout.pack_name(0, 0)
TOMBSTONES = {layout.COMMIT, layout.RETIRED}


def test_every_case_has_its_tests() -> None:
    cases = [26, 27, 28, 29, 30, 32, 33, 34, 36, 37, 38, 89, 96, 97, 98, 99, 100, 101]
    assert_every_case_has_tests(__doc__, cases)


def _save(process: Process, *steps: int, run: str = "run") -> None:
    with process.checkpointer(run) as checkpointer:
        for step in steps:
            checkpointer.save(state_of(step), step=step).result(20)  # type: ignore[union-attr]
            checkpointer.wait(20)


def _staged(place: TieredPlace, process: Process, run: str = "run") -> list[int]:
    """Steps of which the stage has something, in the order of their commits."""
    return [row.step for row in process.rows(run) if place.names(place.stage_url, row.key)]


def _collect(process: Process) -> None:
    done = gc.collect(process.site, dry_run=False, grace=NOW)
    assert (done.damaged, done.waiting, done.unknown) == ((), (), ())


# -- C: what a stage keeps --------------------------------------------------------------------------------
def test_fr027_the_last_commits_are_kept_whatever_their_steps(place: TieredPlace) -> None:
    process = place.open(stage={"keep": 2})
    steps = [9, 10, 100, 1000, 9999, 10000]
    for at, step in enumerate(steps):
        _save(process, step)
        assert _staged(place, process) == steps[max(0, at - 1) : at + 1]
    assert process.repository.latest("run").step == 10000
    assert all(PACK in place.names(place.url, row.key) for row in process.rows())


def test_fr028_the_best_and_the_latest_stay_on_every_tier(place: TieredPlace) -> None:
    process = place.open(replicas=1)
    _save(process, 1, 2, 3)
    best, other, latest = process.rows()
    process.repository.tag(best.id, "best")
    for row in (best, latest):
        with pytest.raises(Conflict):
            gc.retire(process.site, row.id)
    gc.retire(process.site, other.id)
    _collect(process)
    for url in (place.url, place.replica_urls[0]):
        assert [PACK in place.names(url, row.key) for row in (best, other, latest)] == [True, False, True]
    assert_state(process.repository.generation(best.id).load(), 1)


def test_fr029_a_run_frees_nothing_of_another(place: TieredPlace) -> None:
    process = place.open(stage={"keep": 1}, replicas=1)
    _save(process, 5, run="a")
    urls = (place.url, place.stage_url, place.replica_urls[0])
    before = {url: place.objects(url) for url in urls}
    with process.checkpointer("b") as checkpointer:
        process.repository.latest("a").restore(live := state_of(0))
        assert_state(live, 5)
        for step in (6, 7, 8):
            checkpointer.save(state_of(step), step=step).result(20)  # type: ignore[union-attr]
    gc.retire(process.site, process.rows("b")[0].id)
    _collect(process)
    assert _staged(place, process, "b") == [8]
    for url in urls:
        after = place.objects(url)
        assert before[url]
        assert {key: after.get(key) for key in before[url]} == before[url]


def test_fr030_after_a_rollback_the_later_commit_is_kept(place: TieredPlace) -> None:
    process = place.open(stage={"keep": 1})
    _save(process, 900, 1000)
    with process.checkpointer() as checkpointer:
        report = checkpointer.restore(state_of(0), at="step:900")
        assert report is not None
        checkpointer.save(state_of(910), step=910).result(20)  # type: ignore[union-attr]
    assert _staged(place, process) == [910]
    assert process.repository.latest("run").step == 910


def test_fr038_restarts_keep_no_more(place: TieredPlace) -> None:
    for step in range(6):
        process = place.open(stage={"keep": 2})
        _save(process, step)
        assert _staged(place, process) == list(range(step + 1))[-2:]
        process.end()


# -- C: gc beside others ------------------------------------------------------------------------------------
STOPS: list[tuple[str, str, Callable[[Any], bool]]] = [
    ("stage", "finish", of_pack),
    ("stage", "create", named("staged")),
    ("durable", "open_writer", of_pack),
    ("durable", "finish", of_pack),
    ("durable", "create", named(layout.COMMIT)),
    ("replica", "finish", of_pack),
    ("replica", "create", named("manifest-")),
]


@pytest.mark.parametrize(("tier", "op", "when"), STOPS)
def test_fr032_a_writer_stopped_anywhere_loses_nothing_to_gc(
    place: TieredPlace, tier: str, op: str, when: Callable[[Any], bool]
) -> None:
    writer = place.open(replicas=1)
    _save(writer, 1)
    backend = {"stage": writer.stage, "durable": writer.backend, "replica": writer.replica()}[tier]
    held = backend.add(Fault(op, hold=threading.Event(), when=when))
    other = place.open(replicas=1)
    with writer.checkpointer() as checkpointer:
        pending = checkpointer.save(state_of(2), step=2)
        assert pending is not None
        assert held.reached.wait(10)
        done = gc.collect(other.site, dry_run=False, grace=NOW)
        assert held.hold is not None
        held.hold.set()
        assert (done.items, done.unknown, done.damaged, done.adopted) == ((), (), (), ())
        assert pending.result(20).verify().ok
    assert_state(ckptfmt.load(f"{place.replica_urls[0]}#run", catalog="none"), 2)
    assert place.objects(place.replica_urls[0]) == place.objects(place.url)


def test_fr033_what_another_refers_to_stays_on_every_tier(place: TieredPlace) -> None:
    process = place.open(replicas=1)
    _save(process, 1)
    (first,) = process.rows()
    real = process.catalog.mark_durable

    def refer(generation_id: int, facts: Any, *, fence: int) -> GenerationRecord:
        """Step 2 reuses the pack of step 1 beside its own."""
        shared = process.site.sql().packs(first.id)[0]
        foreign = PackRecord(first.key, shared.name, 0, shared.nbytes, shared.header_digest)
        return real(generation_id, dataclasses.replace(facts, packs=(*facts.packs, foreign)), fence=fence)

    process.catalog.mark_durable = refer  # type: ignore[method-assign]
    _save(process, 2)
    del process.catalog.mark_durable
    _save(process, 3)
    gc.retire(process.site, first.id)
    _collect(process)
    for url in (place.url, place.replica_urls[0]):
        assert place.names(url, first.key) == {*TOMBSTONES, PACK}
    gc.retire(process.site, process.rows()[1].id)
    _collect(process)
    _collect(process)
    for url in (place.url, place.replica_urls[0]):
        assert place.names(url, first.key) == TOMBSTONES
    assert_state(ckptfmt.load(f"{place.replica_urls[0]}#run", catalog="none"), 3)


# -- C: names and places --------------------------------------------------------------------------------------
@pytest.mark.usefixtures("quick")
def test_fr034_however_tiers_are_spelled_nothing_of_them_is_a_candidate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "linked").symlink_to(tmp_path)
    spellings = ["{}", "./{}", "{}/", f"file://{tmp_path}/{{}}", f"file://{tmp_path}/{{}}/", f"{tmp_path}/linked/{{}}"]
    for step, spelling in enumerate(spellings):
        stage = {"url": spelling.format("stage"), "keep": 9}
        with ckptfmt.open(spelling.format("r"), stage=stage, replicas=[spelling.format("copy")]) as repository:
            with repository.checkpointer("run") as checkpointer:
                checkpointer.save(state_of(step), step=step).result(20)  # type: ignore[union-attr]
            report = repository.gc(dry_run=True)
            assert (report.items, report.unknown, report.waiting) == ((), (), ()), spelling
            repository.gc(dry_run=False)
            assert len(repository._connection.site.sql().tiers()) == 2, "the same places, not new ones"
    for tier in ("r", "stage", "copy"):
        assert len(list((tmp_path / tier).rglob("*.safetensors"))) == len(spellings)


@pytest.mark.usefixtures("quick")
def test_fr036_nothing_beside_a_tier_is_touched(tmp_path: Path) -> None:
    """Decoys under the same keys: above the tier, and beside it with a name that begins like its own."""

    def opened() -> ckptfmt.Repository:
        return ckptfmt.open(tmp_path / "p" / "r", stage=tmp_path / "p" / "stage", replicas=[tmp_path / "p" / "copy"])

    with opened() as repository, repository.checkpointer("run") as checkpointer:
        for step in (1, 2):
            checkpointer.save(state_of(step), step=step).result(20)  # type: ignore[union-attr]
    (mark,) = (path.name for path in (tmp_path / "p" / "stage").iterdir())
    decoys: list[Path] = []
    for root in (tmp_path / "p" / "r", tmp_path / "p" / "copy", tmp_path / "p" / "stage" / mark):
        for pack in sorted((tmp_path / "p" / "r").rglob("*.safetensors")):
            key = pack.relative_to(tmp_path / "p" / "r")
            for beside in (root.parent, root.with_name(f"{root.name}2"), root / "runs"):
                decoys.append(beside / key)
                decoys[-1].parent.mkdir(parents=True, exist_ok=True)
                decoys[-1].write_bytes(b"decoy")
    with opened() as repository:
        gc.retire(repository._connection.site, repository.generations(run="run")[-1].id)
        for _ in range(2):
            done = gc.collect(repository._connection.site, dry_run=False, grace=NOW)
        with repository.checkpointer("run") as checkpointer:
            checkpointer.save(state_of(3), step=3).result(20)  # type: ignore[union-attr]
    assert done.damaged == ()
    for root in (tmp_path / "p" / "r", tmp_path / "p" / "copy"):
        own = [path for path in root.glob("runs/*/*/*.safetensors") if path.read_bytes() != b"decoy"]
        assert len(own) == 2
    assert all(decoy.read_bytes() == b"decoy" for decoy in decoys)


def test_fr037_what_was_removed_by_hand_counts_as_gone(place: TieredPlace) -> None:
    process = place.open(replicas=1)
    _save(process, 1, 2)
    first, second = process.rows()
    for url, row in ((place.replica_urls[0], first), (place.url, first), (place.stage_url, second)):
        MemoryBackend(url.partition("://")[2]).delete(f"runs/{row.run_key}/{row.key}/{PACK}")
    gc.retire(process.site, first.id)
    listed = gc.collect(process.site, dry_run=False, grace=NOW)
    assert not [item for item in listed.items if item.object.endswith(PACK)]
    _collect(process)
    for url in (place.url, place.replica_urls[0]):
        assert place.names(url, first.key) == TOMBSTONES
    _save(process, 3)
    assert _staged(place, process) == [3]


# -- J ----------------------------------------------------------------------------------------------------
def test_fr100_a_full_replica_is_named_and_what_was_begun_is_removed(
    place: TieredPlace, caplog: pytest.LogCaptureFixture
) -> None:
    process = place.open(replicas=1)
    _save(process, 1)
    held = sum(process.replica()._stored.values())
    process.replica()._quota = held + 10_000  # type: ignore[misc]  # one generation has 29 kB
    with caplog.at_level(logging.WARNING):
        _save(process, 2)
    first, second = process.rows()
    assert "free 10000 bytes" in caplog.text
    assert [row.step for row in process.site.sql().unreplicated("run", process.replicas[0].uuid)] == [2]
    assert place.names(place.replica_urls[0], second.key) == set()
    assert PACK in place.names(place.replica_urls[0], first.key)
    process.replica()._quota = None  # type: ignore[misc]
    process.replica().add(
        Fault("write_at", error=lambda: OutOfSpace("full", needed=1, free=0), timing="torn", when=of_pack)
    )
    _save(process, 3)
    assert place.names(place.replica_urls[0], process.rows()[-1].key) == set(), "half a pack would keep it full"
    _save(process, 4)
    assert PACK in place.names(place.replica_urls[0], process.rows()[-1].key)


def test_a_shared_folder_above_the_tests_keeps_its_mode(tmp_path: Path) -> None:
    """A run as root had taken /tmp from all other users."""
    shared = tmp_path / "shared"
    closed = shared / "pytest" / "test"
    closed.mkdir(parents=True)
    for folder, mode in ((shared, 0o1777), (closed.parent, 0o700), (closed, 0o700)):
        folder.chmod(mode)
    open_to_others(closed)
    modes = [stat.S_IMODE(folder.stat().st_mode) for folder in (shared, closed.parent, closed)]
    assert modes == [0o1777, 0o755, 0o755]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("tier", ["stage", "replica"])
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_fr101_a_forbidden_tier_is_told_at_opening(tmp_path: Path, tier: str) -> None:
    open_to_others(tmp_path)
    own = tmp_path / "own"
    own.mkdir()
    os.chown(own, 65534, 65534)

    def work() -> None:
        (own / "closed").mkdir(mode=0o555)
        options: dict[str, Any] = {"stage": own / "closed"} if tier == "stage" else {"replicas": [own / "closed"]}
        with pytest.raises(AccessDenied, match=r"closed.*Permission denied.*;.*owner and mode"):
            ckptfmt.open(own / "r", **options)
        (own / "closed").chmod(0o755)
        with ckptfmt.open(own / "r", **options) as repository, repository.checkpointer("run") as checkpointer:
            checkpointer.save(state_of(1), step=1).result(20)  # type: ignore[union-attr]

    in_child(work, uid=65534)
