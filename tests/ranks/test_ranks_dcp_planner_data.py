"""Planners of several ranks under torch.distributed.checkpoint: what they leave, and what several of them offer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from meeting_rig import Job, Rank
from torch.distributed.checkpoint.api import CheckpointException

import ckptfmt
from ckptfmt.torch.dcp import GenerationReader, GenerationWriter

WORLD = 2


@pytest.fixture
def start(root: Any, agent: int) -> Callable[..., Job]:
    return lambda world=WORLD: Job(root, "c10d", world=world, agent=agent)


def writer_of(rank: Rank) -> GenerationWriter:
    return GenerationWriter(rank.job.root, run="run", commit_timeout=30.0)


class Tells(dcp.DefaultSavePlanner):
    """Every rank leaves a word; all of them together are for the planners of loads."""

    def __init__(self, word: str) -> None:
        super().__init__(flatten_state_dict=False)
        self.word = word

    def create_local_plan(self) -> Any:
        return replace(super().create_local_plan(), planner_data=self.word)

    def create_global_plan(self, all_plans: list[Any]) -> tuple[list[Any], Any]:
        plans, metadata = super().create_global_plan(all_plans)
        metadata.planner_data = [plan.planner_data for plan in plans]
        return plans, metadata


class Finds(dcp.DefaultLoadPlanner):
    found: Any = None

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        self.found = metadata.planner_data
        super().set_up_planner(state_dict, metadata, is_coordinator)


def test_what_all_ranks_left_is_found_by_each(start: Callable[..., Job]) -> None:
    def body(rank: Rank) -> Any:
        state = {"w": torch.arange(3.0), f"own{rank.rank}": torch.full((2,), float(rank.rank))}
        with writer_of(rank) as writer:
            dcp.save(state, storage_writer=writer, planner=Tells(f"word {rank.rank}"))
        planner = Finds()
        into = {"w": torch.zeros(3)}
        dcp.load(into, storage_reader=GenerationReader(rank.job.root, run="run"), planner=planner)
        assert torch.equal(into["w"], torch.arange(3.0))
        return planner.found

    assert start().run(body) == [["word 0", "word 1"]] * WORLD


class OffersAll(dcp.DefaultSavePlanner):
    """Leaves every rank what it offers: several write one value."""

    def _dedup_save_plans(self, all_plans: list[Any]) -> list[Any]:
        return all_plans


def test_values_that_several_ranks_offer(start: Callable[..., Job]) -> None:
    """DCP lets one rank write it, whatever the others have; a plan that lets several is refused by DCP itself."""

    def body(rank: Rank) -> Any:
        with writer_of(rank) as writer:
            dcp.save({"same": 7, "differs": rank.rank}, storage_writer=writer)
            with pytest.raises(CheckpointException):
                dcp.save({"same": 7}, storage_writer=writer, planner=OffersAll(), checkpoint_id=1)
            dcp.save({"same": 8}, storage_writer=writer, checkpoint_id=2)
        first = ckptfmt.load(rank.job.root, run="run", at="step:0")
        return [first["same"], first["differs"] in (0, 1), ckptfmt.load(rank.job.root, run="run")]

    assert start().run(body) == [[7, True, {"same": 8}]] * WORLD


def test_tied_tensors_are_whole_under_both_names_and_tied_again_in_the_model(start: Callable[..., Job]) -> None:
    def body(rank: Rank) -> Any:
        weight = torch.arange(6.0)
        with writer_of(rank) as writer:
            dcp.save({"embed": weight, "head": weight, "other": torch.ones(3)}, storage_writer=writer)
        loaded = ckptfmt.load(rank.job.root, run="run")
        assert torch.equal(loaded["embed"], weight)
        assert torch.equal(loaded["head"], weight)
        into = torch.zeros(6)
        dcp.load({"embed": into, "head": into}, storage_reader=GenerationReader(rank.job.root, run="run"))
        assert torch.equal(into, weight)
        return loaded["embed"] is loaded["head"]

    assert start().run(body) == [False] * WORLD
