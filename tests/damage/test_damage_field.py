"""What users of other libraries met, and the test that it does not happen here. Cases of one machine, classes A, K, L, N.

A: something half written, mixed or stale is taken for good

| case | what happened there | tests |
| --- | --- | --- |
| FR-001 | a kill while saving leaves a torn file under the final name | test_whatever_ends_a_process_harms_nothing, test_a_kill_at_any_system_call_shows_nothing_or_all, test_a_process_killed_in_the_middle_is_followed_by_the_next |
| FR-002 | resume takes the newest folder, half written | test_storage_crash_leaves_a_loadable_latest, test_the_latest_does_not_wait_for_one_that_is_being_written, test_newer_ones_are_explained |
| FR-003 | temporary names sort as the newest | test_fr003_leftovers_are_never_candidates, test_leftovers_of_unfinished_creates_go_only_when_no_launch_lives |
| FR-004 | a copy is judged incomplete, and deleted | test_a_copied_folder_opens_verifies_and_can_be_sliced, test_a_copied_repository_opens_whole_and_its_gc_stays_at_home |
| FR-005 | skipped in silence, and training begins anew | test_none_exist_and_none_is_committed_are_two_answers, test_fr082_unreadable_is_not_none, test_a_run_whose_generations_all_went_is_no_fresh_start |
| FR-006 | one of several components is missing | test_fr006_a_component_that_was_not_saved_is_missed, test_fr079_strict_looks_both_ways |
| FR-007 | the name is the only evidence, objects are missing | test_every_pack_that_is_gone_or_short_is_named, test_fr007_one_of_many_objects_is_gone |
| FR-009 | leftovers of a larger save lie in the folder | test_fr009_what_no_manifest_names_is_not_read, test_the_same_step_twice_is_two_generations_and_the_later_is_taken |
| FR-010 | a leftover of the same step blocks the next save | test_a_process_killed_in_the_middle_is_followed_by_the_next, test_storage_crash_leaves_a_loadable_latest |
| FR-012 | one torn older file fails everything | test_a_damaged_older_manifest_harms_neither_the_newest_nor_the_next_save, test_a_damaged_verdict_is_an_error_for_its_own_generation_only |

K: damaged bytes are accepted, or called something else

| case | what happened there | tests |
| --- | --- | --- |
| FR-102 | absent or unreachable bytes become zeros | test_damage, test_fr102_objects_that_are_not_as_recorded_are_named, test_fr102_unavailable_is_neither_absent_nor_corrupt_nor_zeros |
| FR-103 | right length, zeros inside | test_damage, test_fr103_damaged_bytes_of_right_length_are_named |
| FR-106 | corrupt is reported as not found | test_fr106_the_classes_of_answers_are_disjoint, test_every_error_has_its_code, test_exit_codes_of_processes |
| FR-107 | nobody can tell where a byte turned | test_fr107_digests_are_those_of_memory_so_what_storage_changed_is_told_from_what_was_saved |
| FR-108 | a file cut while mapped kills the process | test_fr108_damage_after_opening_is_an_exception_never_a_signal |

L: memory, scale, descriptors

| case | what happened there | tests |
| --- | --- | --- |
| FR-109 | memory grows with every save | test_host_memory_does_not_grow_with_the_number_of_saves |
| FR-110 | all is staged at once, and held too long | test_memory_stays_within_the_limit, test_the_memory_of_a_snapshot_is_free_when_callbacks_run, test_a_state_larger_than_free_memory_is_refused_before_anything |
| FR-113 | a load doubles memory, on the device it came from | test_fr113_a_restore_without_atomic_needs_no_second_copy, test_devices |
| FR-114 | cost grows with all that was ever saved | test_fr114_the_cost_of_the_latest_does_not_grow_with_the_number_of_generations, test_no_question_scans_the_table, test_the_views_answer_at_scale |
| FR-115 | a descriptor for each file | test_fr115_open_files_stay_bounded, test_descriptors_stay_bounded |

N: bytes from anywhere

| case | what happened there | tests |
| --- | --- | --- |
| FR-124 | metadata is unpickled | test_fr124_no_pickle_is_read_or_written_by_anything, test_fr124_what_is_no_manifest_is_refused |
| FR-125 | header fields are trusted | test_fr125_each_rule_of_the_manifest_is_enforced, test_fr125_mutations_end_in_a_typed_error_or_in_true_bytes, test_fr125_only_format_errors_come_out, test_fr125_no_bomb_goes_off |

Of a device or of many ranks, hence not of one machine: FR-111 (plans gathered over the device) and FR-112 (planning for
256 ranks).
"""  # noqa: E501

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from damage_bench import NAMES, Bench, state
from field_cases import assert_every_case_has_tests

import ckptfmt

CASES = [*range(1, 8), 9, 10, 12, 102, 103, 106, 107, 108, 109, 110, 113, 114, 115, 124, 125]


def test_every_case_has_tests_that_exist() -> None:
    assert_every_case_has_tests(__doc__, CASES)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_fr003_leftovers_are_never_candidates(bench: Bench) -> None:
    """Names that sort after every real one, in every folder, of the shapes that writers here and elsewhere leave."""
    folder = bench.folder(5)
    names = ["zzz", "~new.tmp", ".tmp-zzz", "99999999-999999999999-" + "f" * 32 + ".tmp", "COMMIT.json.tmp", "latest"]
    for place in (bench.root, folder, folder.parent, folder.parent / "commits", bench.root / "catalogs"):
        for name in names:
            (place / name).write_bytes(b"torn")
    unfinished = folder.parent / ("f" * 32)
    shutil.copytree(folder, unfinished)
    (unfinished / "COMMIT.json").rename(unfinished / "COMMIT.json.tmp")
    for catalog in (None, "none"):
        with ckptfmt.open(bench.root, mode="r", catalog=catalog) as repository:
            assert repository.latest("main").step == 5
            assert [info.step for info in repository.generations(run="main")] == [5, 4]
    assert ckptfmt.load(folder)["epoch"] == 5
    with ckptfmt.open(bench.root) as repository:
        report = repository.gc(dry_run=False)
        assert [key for key in report.unknown if "f" * 32 in key], "reported, not deleted"
    assert unfinished.exists()
    assert ckptfmt.load(bench.root, run="main")["epoch"] == 5


def test_fr006_a_component_that_was_not_saved_is_missed(tmp_path: Path) -> None:
    ckptfmt.save({"model": np.ones(3), "optim": np.ones(3)}, tmp_path)
    with pytest.raises(ckptfmt.NotFound, match="data"):
        ckptfmt.load(tmp_path, subtree="data")
    live = {"model": np.zeros(3), "optim": np.zeros(3), "data": np.zeros(3)}
    with pytest.raises(ckptfmt.Mismatch, match=r"data: not in the checkpoint \(missing\)"):
        ckptfmt.restore(live, tmp_path)
    assert not any(map(np.any, live.values()))


def test_fr007_one_of_many_objects_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly one problem, before anything is handed out."""
    from ckptfmt.format import pack

    split = pack.split
    monkeypatch.setattr(pack, "split", lambda entries: split(entries, limit=4096))
    generation = ckptfmt.save({f"t{n}": np.full(1024, n, np.int32) for n in range(20)}, tmp_path)
    folder = Path(generation.url.removeprefix("file://"))
    packs = sorted(folder.glob("*.safetensors"))
    assert len(packs) == 20
    packs[7].unlink()
    for read in (
        lambda: ckptfmt.load(tmp_path),
        lambda: ckptfmt.load(tmp_path, keys="t1"),
        lambda: ckptfmt.load(folder),
    ):
        with pytest.raises(ckptfmt.NotFound, match=packs[7].name):
            read()
    assert {problem.object.rpartition("/")[2] for problem in generation.verify().problems} == {packs[7].name}


def test_fr009_what_no_manifest_names_is_not_read(bench: Bench) -> None:
    """Packs, parts and manifests of a larger save, left in the folder: nobody opens them."""
    folder = bench.folder(5)
    left = {
        "r00000-p001.safetensors",
        "r00001-p000.safetensors",
        "r00001.part.json",
        "manifest-" + "f" * 32 + ".json.zst",
    }
    for name in left:
        (folder / name).write_bytes(b"of another world size")
    with bench.watched() as seen:
        for catalog in (None, "none"):
            found = ckptfmt.load(bench.root, run="main", catalog=catalog)
            assert all(np.array_equal(found[name], state(5)[name]) for name in NAMES)
        with ckptfmt.open(bench.root, mode="r") as repository:
            assert repository.latest("main").verify().ok
    assert not [call for call in seen.calls if call[1].rpartition("/")[2] in left]


def test_fr114_the_cost_of_the_latest_does_not_grow_with_the_number_of_generations(bench: Bench) -> None:
    """In calls of storage: the same ones before and after many more generations, by catalog and by proof."""

    def calls(catalog: str | None) -> Counter[str]:
        with bench.watched() as seen, ckptfmt.open(bench.root, mode="r", catalog=catalog) as repository:
            repository.latest("main")
        return Counter(op for op, *_ in seen.calls)

    before = [calls(None), calls("none")]
    with bench.watched(), ckptfmt.open(bench.root) as repository, repository.checkpointer("main") as checkpointer:
        for step in range(6, 16):
            checkpointer.save({"w": np.ones(3)}, step=step)
    assert [calls(None), calls("none")] == before
    assert sum(before[0].values()) <= 8
