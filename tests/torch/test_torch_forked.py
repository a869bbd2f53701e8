"""Tests that run in forks (``forked``) compute there, though the parent has computed with all its threads before."""

from __future__ import annotations

import torch
from forked import in_child


def test_a_fork_computes_after_its_parent() -> None:
    def total() -> float:
        rows = torch.ones(1500, 1500)
        layer = torch.nn.Linear(1500, 4)
        layer(rows.sin() + rows).sum().backward()
        return float(rows.sum())

    assert total() == in_child(total)
