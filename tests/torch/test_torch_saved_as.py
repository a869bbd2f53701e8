"""Which library a tensor came from: asked about one, or about each in turn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

import ckptfmt


def test_one_question_has_the_answer_that_a_row_of_them_has(tmp_path: Path) -> None:
    tied = torch.ones(3)
    state = {
        "parameter": torch.nn.Parameter(torch.zeros(2)),
        "first": tied,
        "second": tied,
        "array": np.zeros(4),
        "text": '{"array":"first"}',
        "bytes": b"x" * 5000,
    }
    ckptfmt.save(state, f"{tmp_path}#run", step=1)
    with ckptfmt.open(tmp_path, mode="r") as repo:
        opened = repo.latest("run")._opened
        names = list(opened.index)
        every = {name: opened.saved_as(name) for name in [names[0], *names]}
        assert every == {name: replace(opened).saved_as(name) for name in names}
    assert every == {"parameter": "tensor", "first": "tensor", "array": "array", "bytes": "array"}
