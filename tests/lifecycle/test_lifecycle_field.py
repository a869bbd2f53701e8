"""What users of other libraries met, and the test that it does not happen here. Cases of one machine, classes B, D, M.

B: a save reported as done that is not, or that is not what was saved

| case | what happened there | tests |
| --- | --- | --- |
| FR-013 | values of a later step are in the save | test_changes_after_save_returns_do_not_reach_storage |
| FR-014 | a failed writer is reported as success | test_a_failed_write_on_a_worker_thread_fails_the_save, test_any_exception_in_a_writer_fails_its_save_alone, test_an_unseen_failure_surfaces |
| FR-015 | "latest" moves before the data is durable | test_data_then_part_then_rank_then_manifest_then_row_then_commit_then_proof_then_hint, test_whatever_ends_a_process_harms_nothing |
| FR-016 | the last save is lost at exit, status 0 | test_a_process_ends_with_a_save_in_flight, test_a_save_that_fails_at_exit_makes_the_status_a_failure |
| FR-017 | closing hides the error of the training | test_the_exception_of_the_body_stays_primary_with_a_note |
| FR-020 | copies from a device are written before they are complete | test_every_step_of_a_training_loop_is_saved_as_it_was |
| FR-021 | a process that does not own a save says that it is complete | test_a_forked_child_neither_saves_nor_waits_nor_closes |
| FR-023 | saving inside a signal handler; workers inherit it | test_a_signal_only_sets_a_flag, test_a_terminated_group_saves_once_and_a_kill_soon_after_harms_nothing |
| FR-024 | preemption saves are ignored, or pile up | test_each_of_five_preemptions_is_resumed_at_the_newest, test_a_preemption_asks_for_one_save |
| FR-025 | a writer hangs for good | test_a_writer_that_hangs_fails_in_time_and_commits_nothing_when_it_comes_back |

D: which one is the latest, and two writers

| case | what happened there | tests |
| --- | --- | --- |
| FR-039 | the latest by text order of names | test_the_latest_is_the_last_commit_whatever_its_step |
| FR-040 | the latest by clock or mtime | test_clocks_and_file_times_decide_nothing, test_the_order_of_commits_survives_every_jump |
| FR-041 | a second save gets another name that nobody resumes | test_the_same_step_twice_is_two_generations_and_the_later_is_taken |
| FR-042 | two jobs mix their files in one folder | test_two_processes_that_save_the_same_step_never_mix, test_a_launch_overtaken_at_any_operation_commits_nothing_more |
| FR-043 | two writers share a temporary name | test_one_of_many_creates_wins, test_nobody_sees_a_part_of_a_create |
| FR-045 | waiting for the newest hides an older whole one | test_the_latest_does_not_wait_for_one_that_is_being_written |

M: the catalog, locks, clocks, forks

| case | what happened there | tests |
| --- | --- | --- |
| FR-116 | "database is locked"; a network file system | test_eight_processes_of_many_state_changes, test_many_processes_on_one_catalog_meet_no_lock, test_network_file_systems_are_refused |
| FR-118 | a failed catalog write goes unnoticed | test_a_catalog_away_from_the_commit_on_leaves_the_outcome_unknown, test_catalog_crash_leaves_a_loadable_latest, test_a_save_whose_every_answer_is_lost_once |
| FR-119 | a database connection shared across a fork | test_forked_children_have_connections_of_their_own, test_nothing_is_open_across_a_fork, test_children_of_a_process_that_has_used_the_server |
| FR-120 | a storage client hangs in a forked child | test_a_child_forked_in_the_middle_of_a_save_opens_and_saves_for_itself |
| FR-121 | a lock is judged by two clocks | test_the_clock_of_the_asking_process_does_not_matter, test_a_jump_forward_lets_others_in_and_the_older_launch_commits_nothing, test_a_holder_that_renews_over_a_jump_back_is_alive |
| FR-122 | a dead process's lock blocks for days | test_a_killed_holder_counts_as_gone_at_once, test_a_holder_that_stops_renewing_is_waited_for_and_no_longer, test_a_clock_that_goes_back_does_not_lock_a_run_for_as_long |
| FR-123 | several processes migrate at once; a foreign version table | test_four_processes_create_one_schema, test_a_foreign_database_is_left_alone, test_an_upgrade_killed_at_any_statement_is_done_again, test_processes_that_start_on_an_empty_database, test_another_repository_and_another_database |

Of more than one rank or tier, hence not of one machine: FR-022 (a staged file that changes before it is replicated) and
FR-044 (ranks that make up different names).
"""  # noqa: E501

from __future__ import annotations

from field_cases import assert_every_case_has_tests

CASES = [*range(13, 18), *range(20, 22), *range(23, 26), *range(39, 44), 45, 116, *range(118, 124)]


def test_every_case_has_tests_that_exist() -> None:
    assert_every_case_has_tests(__doc__, CASES)
