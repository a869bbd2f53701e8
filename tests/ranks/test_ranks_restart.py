"""A launcher that starts all ranks again keeps its store: what an earlier start left there is not for the next one."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
from meeting_rig import Job, Rank, assert_saved, save_and_wait

import ckptfmt


class RestartedJob(Job):
    """Start number ``restart`` of the processes of a job, on the store that ``agent`` holds from the first to the
    last."""

    def __init__(self, root: Path, agent: int, restart: int, prefix: str) -> None:
        super().__init__(root, "c10d", world=2, agent=agent)
        self.restart = restart
        self.token = prefix

    def join(self, rank: Rank) -> None:
        """As ``Rank.join_group``, but gloo would look for the peers of the last start in such a store."""
        import torch.distributed as dist
        import torch.testing._internal.distributed.fake_pg  # noqa: F401

        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(self.restart)
        store = dist.PrefixStore(self.token, dist.TCPStore("127.0.0.1", self.port, is_master=False))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dist.init_process_group("fake", store=store, rank=rank.rank, world_size=self.world)

    def _run(self, body: Any, number: int) -> Any:
        rank = Rank(self, number)
        rank.join_group = lambda: self.join(rank)  # type: ignore[method-assign]
        return self.guarded(body, rank)


@pytest.mark.slow
def test_ranks_that_are_started_again_find_a_launch_of_their_own(
    root: Path, agent: int, tmp_path: Path, nobody_stays: None
) -> None:
    def body(rank: Rank) -> Any:
        state = rank.state(0)
        with rank.checkpointer() as checkpointer:
            done = checkpointer.restore(into=state)
            first = 1 if done is None else done.step + 1
            for step in range(first, first + 2):
                save_and_wait(checkpointer, rank.state(step), step)
            if rank.job.restart == 0 and rank.rank == 1:  # type: ignore[attr-defined]
                rank.die()
            return first

    prefix = tmp_path.name
    first = RestartedJob(root, agent, 0, prefix).run_some(body)
    assert first[1] is None
    for restart in (1, 2):
        assert RestartedJob(root, agent, restart, prefix).run(body) == [1 + 2 * restart] * 2
        assert_saved(root, 2 + 2 * restart, 2)
    with ckptfmt.open(root, mode="r") as repository:
        assert len(repository._connection.site.sql().launches("run")) == 3
