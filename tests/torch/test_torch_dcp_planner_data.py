"""What planners of one's own leave in ``planner_data``, and what planners of loads find there."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlanner

import ckptfmt
from ckptfmt.errors import UnsupportedValue
from ckptfmt.torch.dcp import GenerationReader, GenerationWriter

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package"),
    pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)"),
]
STATE = {"model": {"w": torch.arange(4.0), "layers": [torch.ones(2), 3]}, "n": 5}
PATHS = {
    "model.w": ("model", "w"),
    "model.layers.0": ("model", "layers", 0),
    "model.layers.1": ("model", "layers", 1),
    "n": ("n",),
}


@pytest.fixture(autouse=True)
def no_plans_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps cached plans for the whole process."""
    for name in [name for name in vars(SavePlanner) if name.startswith("_cached_")]:
        monkeypatch.setattr(SavePlanner, name, {})


class Leaves(dcp.DefaultSavePlanner):
    """Leaves ``data`` beside the paths, or instead of them."""

    def __init__(self, data: Any, **options: Any) -> None:
        super().__init__(**options)
        self.data = data

    def create_global_plan(self, all_plans: list[Any]) -> tuple[list[Any], Any]:
        plans, metadata = super().create_global_plan(all_plans)
        if isinstance(self.data, dict) and metadata.planner_data is not None:
            metadata.planner_data = {**metadata.planner_data, **self.data}
        else:
            metadata.planner_data = self.data
        return plans, metadata


class LeavesAnother(Leaves):
    """In the way of the example in torch's documentation of planners."""

    def create_global_plan(self, all_plans: list[Any]) -> tuple[list[Any], Any]:
        plans, metadata = dcp.DefaultSavePlanner.create_global_plan(self, all_plans)
        return plans, replace(metadata, planner_data=self.data)


class Finds(dcp.DefaultLoadPlanner):
    """Goes by what the planner of the save left."""

    found: Any = None

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        self.found = metadata.planner_data
        super().set_up_planner(state_dict, metadata, is_coordinator)


def found_in(root: Path) -> Any:
    planner = Finds()
    into = {"model": {"w": torch.zeros(4)}}
    dcp.load(into, storage_reader=GenerationReader(root), planner=planner)
    assert torch.equal(into["model"]["w"], torch.arange(4.0))
    return planner.found


def test_the_default_planner_s_paths_come_from_the_state(root: Path, writer: GenerationWriter) -> None:
    dcp.save(STATE, storage_writer=writer)
    assert found_in(root) == PATHS
    with ckptfmt.open(root, mode="r") as repository:
        assert repository.latest().metadata == {}


OF_THEIR_OWN: list[Any] = [
    {"__scales__": {"model.w": 0.5}, ("a", 1): b"bytes"},
    {"model.w": "another thing than a path"},
    ["rank 0", {"of": (1, 2)}],
    "a text",
    0,
]


@pytest.mark.parametrize("data", OF_THEIR_OWN, ids=str)
@pytest.mark.parametrize("caching", [False, True], ids=["", "cached plans"])
def test_a_planner_s_own_data_is_kept(
    root: Path, writer: GenerationWriter, caplog: pytest.LogCaptureFixture, data: Any, caching: bool
) -> None:
    writer.metadata = {"loss": 1.5}
    for step in (1, 2):
        planner = Leaves(data, enable_plan_caching=caching)
        dcp.save(STATE, storage_writer=writer, planner=planner, checkpoint_id=step)
        assert found_in(root) == ({**PATHS, **data} if isinstance(data, dict) else data)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    with ckptfmt.open(root, mode="r") as repository:
        assert repository.latest().metadata["loss"] == 1.5
    assert ckptfmt.load(root).keys() == STATE.keys()
    dcp.save(STATE, storage_writer=writer, checkpoint_id=3)
    assert found_in(root) == PATHS


def test_data_that_is_seen_too_late_is_told(
    root: Path, writer: GenerationWriter, caplog: pytest.LogCaptureFixture
) -> None:
    dcp.save(STATE, storage_writer=writer, planner=LeavesAnother({"own": 1}))
    assert "what the planner left in planner_data is not kept" in caplog.text
    assert found_in(root) == PATHS
    caplog.clear()
    writer.metadata = ["a list has no place for it"]
    dcp.save(STATE, storage_writer=writer, planner=Leaves("mine"), checkpoint_id=1)
    assert "what the planner left in planner_data is not kept" in caplog.text
    with ckptfmt.open(root, mode="r") as repository:
        assert repository.latest().metadata == ["a list has no place for it"]


def test_data_that_cannot_be_stored_fails_the_save(root: Path, writer: GenerationWriter) -> None:
    with pytest.raises(CheckpointException) as caught:
        dcp.save(STATE, storage_writer=writer, planner=Leaves({"own": {"deep": object()}}))
    error = caught.value.failures[0][0]
    assert isinstance(error, UnsupportedValue)
    assert "dcp_planner_data" in str(error)
    dcp.save(STATE, storage_writer=writer, planner=Leaves({"own": 1}))
    assert found_in(root)["own"] == 1
