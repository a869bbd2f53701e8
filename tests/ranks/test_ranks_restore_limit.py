"""A joint restore under ``host_bytes_max`` below the state: each rank fills as it reads, once all have agreed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from meeting_rig import WORLD, Job, Rank, state_of

import ckptfmt
from ckptfmt.engine import plan as plans
from ckptfmt.errors import Corrupt, Mismatch
from ckptfmt.testing.faults import Call, Fault

Start = Callable[..., Job]
LIMIT = 4096


@pytest.fixture(params=["catalog"])
def place(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def root(tmp_path: Path, three_generations: Path, quick: None) -> Path:
    shutil.copytree(three_generations, tmp_path / "r")
    ckptfmt.open(tmp_path / "r").close()
    return tmp_path / "r"


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "HOST_BYTES_MIN", LIMIT)


def facts_of(state: dict[str, Any]) -> list[Any]:
    return [state["w"].local.tolist(), state["b"].tolist(), state["own"].value, state["step"]]


def expected(seed: int, rank: int) -> list[Any]:
    return facts_of(state_of(seed, rank, WORLD))


def reads_b(call: Call) -> bool:
    """Those bytes alone are more than a page."""
    return call.key.endswith(".safetensors") and call.nbytes > 4096


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_whose_bytes_are_damaged_tells_what_it_changed_and_the_others_are_restored(
    start: Start, victim: int
) -> None:
    def body(rank: Rank) -> Any:
        broken = Fault("read_into", error=lambda: Corrupt("flipped bits"), when=reads_b)
        with rank.checkpointer(*([broken] if rank.rank == victim else []), host_bytes_max=LIMIT) as checkpointer:
            live = rank.state(77)
            try:
                report = checkpointer.restore(live)
            except Corrupt as error:
                return [facts_of(live), " ".join(getattr(error, "__notes__", []))]
            assert report is not None
            return [facts_of(live), report.step]

    for rank, (facts, told) in enumerate(start().run(body)):
        if rank == victim:
            assert told == "already changed: w"
            assert facts == [expected(3, rank)[0], *expected(77, rank)[1:]]
        else:
            assert (facts, told) == (expected(3, rank), 3)


def test_what_is_known_before_a_byte_is_read_still_changes_nothing_anywhere(start: Start) -> None:
    def body(rank: Rank) -> Any:
        with rank.checkpointer(host_bytes_max=LIMIT) as checkpointer:
            live = rank.state(77)
            if rank.rank == 1:
                live["more"] = 1
            with pytest.raises(Mismatch, match=r"rank 1|more: not in the checkpoint"):
                checkpointer.restore(live)
            return facts_of(live)

    assert start().run(body) == [expected(77, rank) for rank in range(WORLD)]


def test_who_may_fall_back_verifies_all_before_anything_is_filled(start: Start) -> None:
    def body(rank: Rank) -> Any:
        faults = [Fault("read_into", error=lambda: Corrupt("flipped bits"), when=reads_b)] if rank.rank == 2 else []
        with rank.checkpointer(*faults, host_bytes_max=LIMIT) as checkpointer:
            live = rank.state(77)
            report = checkpointer.restore(live, fallback=True)
            assert report is not None
            return [facts_of(live), report.step, len(report.fell_back_from)]

    assert start().run(body) == [[expected(2, rank), 2, 1] for rank in range(WORLD)]
