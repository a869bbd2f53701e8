"""The judge of the demo sees differences."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckptfmt.demo.comparison import compare
from ckptfmt.demo.corpus import write_corpus
from ckptfmt.demo.digests import digests
from ckptfmt.demo.journal import Journal, losses, read_journal
from ckptfmt.demo.main import run_demo
from ckptfmt.errors import DrillFailed, InvalidInput


def events(values: list[float], **final: str) -> list[dict[str, Any]]:
    steps = [{"event": "step", "step": step, "loss": value.hex()} for step, value in enumerate(values)]
    return [*steps, {"event": "finished", "digests": final}]


def test_equal_trainings_are_equal() -> None:
    reference = events([3.0, 2.0], **{"/model/w": "a", "/model/b": "b", "/rng/torch": "c"})
    assert compare(reference, [("one", reference[:1]), ("two", reference[1:])]) == {"model": 2, "rng": 1}


@pytest.mark.parametrize(
    ("lives", "words"),
    [
        ([("one", events([3.0, np.nextafter(2.0, 3.0).item()], **{"/model/w": "a"}))], "loss of step 1"),
        ([("one", events([3.0, 2.0], **{"/model/w": "b"}))], "/model/w"),
        ([("one", events([3.0, 2.0]))], "/model/w"),
        ([("one", events([3.0, 2.0], **{"/model/w": "a", "/rng/more": "b"}))], "/rng/more"),
        ([("one", events([3.0], **{"/model/w": "a"}))], "step 1 was trained by no process"),
    ],
    ids=["last bit of a loss", "a digest", "a value is absent", "a value too many", "a step is absent"],
)
def test_any_difference_is_named(lives: list[tuple[str, list[dict[str, Any]]]], words: str) -> None:
    with pytest.raises(DrillFailed, match=words):
        compare(events([3.0, 2.0], **{"/model/w": "a"}), lives)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.float32)),
        (np.zeros(4), np.array([0, 0, 0, 1e-300])),
        (1, 1.0),
        (0.1, 0.1 + 2**-56),
    ],
)
def test_digests_tell_values_apart(one: object, other: object) -> None:
    assert digests({"x": one}).keys() == digests({"x": other}).keys() == {"/x"}
    assert digests({"x": one}) != digests({"x": other})
    assert digests({"x": one}) == digests({"x": one})


def test_digests_cover_every_leaf() -> None:
    state = {"a": [torch.zeros(1), {"b": np.zeros(1)}], "rng": random.Random(1).getstate()}
    found = digests(state)
    assert {"/a/0", "/a/1/b", "/rng/1"} <= found.keys()


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    journal.tell("step", step=0, loss=(0.5).hex())
    journal.tell("step", step=1, loss=(0.25).hex())
    path.write_bytes(path.read_bytes()[:-5])
    assert losses(read_journal(path)) == {0: (0.5).hex()}
    assert read_journal(tmp_path / "absent") == []


def test_the_text_is_that_of_the_whole_package(tmp_path: Path) -> None:
    assert write_corpus(tmp_path / "corpus") > 100_000
    text = (tmp_path / "corpus").read_text()
    # One line each of a room and of two linked ones.
    for words in ("Real text to train on", "class PosixBackend", "script_location"):
        assert words in text


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    with pytest.raises(InvalidInput, match="not empty"):
        run_demo(tmp_path)
    assert (tmp_path / "precious").read_text() == "mine"
