"""What users of other libraries met with state that is spread over ranks, and the test that it does not happen here.

G: sharded and per-rank state

| case | what happened there | tests |
| --- | --- | --- |
| FR-070 | ranks without a row crash, and the others wait for ever | test_twenty_rows_over_eight_ranks_to_any_number, test_any_placement_into_any_other |
| FR-072 | a dimension has to be divisible by the number of ranks | test_shapes_that_no_number_of_ranks_divides, test_any_boxes_into_any_others, test_fsdp_to_tensor_parallel_and_back |
| FR-073 | every rank draws the random numbers of one | test_random_numbers_are_each_rank_s_own, test_each_rank_gets_its_own_at_the_same_world_size |
| FR-074 | another world size drops or repeats samples, silently | test_nobody_s_by_default_at_another_world_size, test_a_job_shrinks_and_grows |
| FR-075 | one rank's loader state is stored for all | test_what_a_rank_keeps_every_rank_that_saves_has_to_keep, test_a_rank_that_did_not_save_kept_none |
| FR-076 | parameters without a gradient have no optimizer state | test_a_parameter_that_was_never_stepped_begins_afresh |
| FR-128 | a shape that depends on the number of ranks | test_shapes_and_dtypes_are_compared_with_the_whole |
"""  # noqa: E501

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from field_cases import assert_every_case_has_tests
from reshard_rig import as_ranks, open_folder, restore, save, save_together
from test_ranks_reshard_torch import Job

from ckptfmt import Sharded


def test_every_case_has_tests_that_exist() -> None:
    assert_every_case_has_tests(__doc__, [70, 72, 73, 74, 75, 76, 128])


def shares(whole: np.ndarray[Any, Any], ranks: int) -> list[dict[str, Any]]:
    """As ``torch.chunk`` cuts: the last ranks get less, or nothing."""
    each = math.ceil(len(whole) / ranks)
    return [
        {
            "w": Sharded(
                whole[rank * each : (rank + 1) * each].copy(),
                whole.shape,
                (min(rank * each, len(whole)), *[0] * (whole.ndim - 1)),
            )
        }
        for rank in range(ranks)
    ]


def round_trip(whole: np.ndarray[Any, Any], saved: int, live: int) -> None:
    opened = save(shares(whole, saved))
    for rank, state in enumerate(shares(np.zeros_like(whole), live)):
        restore(opened, state, rank=rank, world_size=live)
        np.testing.assert_array_equal(state["w"].local, shares(whole, live)[rank]["w"].local)


@pytest.mark.parametrize("live", [1, 3, 8, 11])
def test_twenty_rows_over_eight_ranks_to_any_number(live: int) -> None:
    round_trip(np.arange(40.0).reshape(20, 2), 8, live)


@pytest.mark.parametrize("shape", [(1,), (3, 5), (7,)], ids=str)
def test_shapes_that_no_number_of_ranks_divides(shape: tuple[int, ...]) -> None:
    whole = np.arange(math.prod(shape), dtype=np.int16).reshape(shape)
    for saved in (2, 4, 5):
        for live in (2, 4, 5):
            round_trip(whole, saved, live)


@pytest.mark.slow
def test_a_parameter_that_was_never_stepped_begins_afresh(tmp_path: Path) -> None:
    """The next step equals that of the job that was not interrupted, at another world size, too."""
    folder = tmp_path / "g"

    def frozen(size: int) -> Job:
        job = Job(size)
        for parameter in job.net[0].parameters():
            parameter.requires_grad_(False)
        return job

    def step(job: Job) -> None:
        for parameter in job.net.parameters():
            parameter.requires_grad_(True)
        job.train(1)

    def saving(rank: int, size: int) -> Any:
        job = frozen(size)
        job.train()
        save_together(folder, job.state, rank, size)
        told = [len(job.optimizer.state), job.image()]
        step(job)
        return [*told, len(job.optimizer.state), job.image()]

    def resuming(rank: int, size: int) -> Any:
        job = frozen(size)
        restore(open_folder(folder), job.state, rank=rank, world_size=size)
        told = [len(job.optimizer.state), job.image()]
        step(job)
        return [*told, len(job.optimizer.state), job.image()]

    saved = as_ranks(tmp_path, 2, saving)[0]
    assert (saved[0], saved[2]) == (4, 6)
    assert as_ranks(tmp_path, 2, resuming) == [saved] * 2
    assert [told[:3] for told in as_ranks(tmp_path, 3, resuming)] == [saved[:3]] * 3
