"""The process's random number generators, and the marks of a state."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from ckptfmt.errors import InvalidInput, Mismatch
from ckptfmt.leaves import PerRank, Sharded
from ckptfmt.rng import Rng


@pytest.fixture(autouse=True)
def _unchanged_afterwards() -> Iterator[None]:
    before = Rng().state()
    yield
    Rng().restore(before)


def draw() -> list[Any]:
    return [random.random(), random.gauss(0, 1), np.random.random(), np.random.normal(), torch.rand(3).tolist()]


def test_every_stream_continues_where_it_was(archive: Any) -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    draw()
    state = archive.round_trip(Rng().state())
    expected = [draw(), draw()]
    random.seed(9)
    np.random.seed(9)
    torch.manual_seed(9)
    Rng().restore(state)
    assert [draw(), draw()] == expected


def generators(seed: int) -> dict[str, Any]:
    return {
        "python": random.Random(seed),
        "pcg": np.random.default_rng(seed),
        "philox": np.random.Generator(np.random.Philox(seed)),
        "mt": np.random.Generator(np.random.MT19937(seed)),
        "sfc": np.random.Generator(np.random.SFC64(seed)),
        "legacy": np.random.RandomState(seed),
        "torch": torch.Generator().manual_seed(seed),
    }


def draw_from(own: dict[str, Any]) -> list[Any]:
    drawn: list[Any] = []
    for generator in own.values():
        if isinstance(generator, torch.Generator):
            drawn.append(torch.rand(2, generator=generator).tolist())
        else:
            drawn.append(generator.random())
    return drawn


def test_own_generators_continue_too(archive: Any) -> None:
    own, others = generators(1), generators(2)
    draw_from(own)
    state = archive.round_trip(Rng(own).state())
    expected = draw_from(own)
    Rng(others).restore(state)
    assert draw_from(others) == expected


def test_the_state_is_read_at_each_call_and_is_a_copy() -> None:
    rng = Rng()
    first = rng.state()
    kept = first["torch"].clone()
    draw()
    assert torch.equal(first["torch"], kept)
    assert not torch.equal(rng.state()["torch"], kept)


def test_a_part_that_this_process_lacks_is_named_and_nothing_is_set() -> None:
    rng = Rng(generators(1) | {"extra": random.Random(1)})
    state = rng.state() | {"cuda": [torch.zeros(16, dtype=torch.uint8)] * 99, "quantum": 1}
    here = generators(3)
    here["pcg"] = random.Random(1)
    here["philox"] = np.random.Generator(np.random.PCG64(1))
    here["new"] = random.Random(1)
    before = Rng(here).state()
    with pytest.raises(Mismatch, match="99 devices"):
        Rng(here).check(state)
    with pytest.raises(Mismatch) as caught:
        Rng(here).restore(state)
    text = "\n".join(caught.value.problems)
    for words in (
        "cuda: generators of 99 devices",
        "quantum: ",
        "generators.extra: saved, but not registered",
        "generators.new: registered with this Rng, but not in the saved state",
        "generators.pcg: saved as numpy.random.Generator, but here it is random.Random",
        "generators.philox: the saved state is refused",
    ):
        assert words in text
    assert len(caught.value.problems) == 6
    after = Rng(here).state()
    assert after["python"] == before["python"]
    assert torch.equal(after["torch"], before["torch"])
    assert after["generators"]["python"] == before["generators"]["python"]


@pytest.mark.parametrize(
    ("part", "value"),
    [("python", (3, (1, 2), None)), ("numpy", {"state": 1}), ("torch", torch.zeros(3, dtype=torch.uint8))],
)
def test_a_damaged_part_is_named(part: str, value: Any) -> None:
    with pytest.raises(Mismatch, match=f"{part}: the saved state is refused"):
        Rng().restore({**Rng().state(), part: value})


@pytest.mark.parametrize("bad", [{"x": 1}, {"x": random.SystemRandom()}, {1: random.Random()}])
def test_only_generators_with_a_state_are_taken(bad: Any) -> None:
    with pytest.raises(InvalidInput, match="generators"):
        Rng(bad)


def test_libraries_that_are_not_imported_stay_out() -> None:
    code = (
        "import sys; from ckptfmt.rng import Rng; from ckptfmt.errors import Mismatch\n"
        "rng = Rng(); state = rng.state(); assert list(state) == ['python'], state.keys(); rng.restore(state)\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "try: rng.restore(state | {'numpy': {}, 'torch': b'', 'cuda': [b'']})\n"
        "except Mismatch as error: print([line.partition(':')[0] for line in error.problems])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['numpy', 'torch', 'cuda']"


def test_per_rank_holds_anything() -> None:
    mark = PerRank({"position": 3})
    assert mark.value == {"position": 3}
    with pytest.raises(AttributeError):
        mark.value = 1  # type: ignore[misc]


def test_sharded_freezes_plain_numbers() -> None:
    mark = Sharded(torch.zeros(2, 3), torch.Size([8, 3]), [np.int64(6), 0])
    assert mark.global_shape == (8, 3)
    assert mark.offsets == (6, 0)
    assert type(mark.offsets[0]) is int
    assert type(mark.global_shape) is tuple
    Sharded(np.zeros(()), (), ())
    Sharded(torch.zeros(0, 3), (8, 3), (8, 0))


@pytest.mark.parametrize(
    ("local", "shape", "offsets", "words"),
    [
        ([1, 2], (2,), (0,), "no shape"),
        (np.zeros((2, 3)), (8,), (0, 0), "global_shape 1"),
        (np.zeros((2, 3)), (8, 3), (0,), "offsets 1"),
        (np.zeros((2, 3)), (8, 3), (7, 0), "axis 0"),
        (np.zeros((2, 3)), (8, 3), (-1, 0), "negative"),
        (np.zeros((2, 3)), (8, -3), (0, 0), "negative"),
        (np.zeros((2, 3)), (8, 3.0), (0, 0), "whole numbers"),
        (np.zeros((2, 3)), 8, (0, 0), "whole numbers"),
        (np.zeros((2, 3)), (8, 3), (True, 0), "whole numbers"),
    ],
)
def test_sharded_refuses_boxes_that_cannot_be(local: Any, shape: Any, offsets: Any, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        Sharded(local, shape, offsets)
