"""The library never draws from a generator that belongs to the training."""

from __future__ import annotations

import ast
import random
import sqlite3
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import ckptfmt

ROOT = Path(ckptfmt.__path__[0])
LIBRARY = sorted(
    path
    for path in ROOT.rglob("*.py")
    if path.relative_to(ROOT).parts[0] not in ("demo", "testing") or path.name == "__init__.py"
)
OWN = {"Random", "SystemRandom", "getstate", "setstate"}
"""Names of the module ``random`` that make a generator, or look at the global one without drawing."""


def global_draws(source: str) -> list[str]:
    """Uses of ``random.x`` and ``np.random.x`` that draw from, or seed, a global generator."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "random":
            found += [] if node.attr in OWN else [f"random.{node.attr}"]
        if isinstance(node, ast.ImportFrom) and node.module == "random":
            found += [f"from random import {name.name}" for name in node.names if name.name not in OWN]
    return found


def test_the_scan_sees_a_draw() -> None:
    assert global_draws("import random\nx = random.uniform(0, 1)") == ["random.uniform"]
    assert global_draws("import random\nx = random.SystemRandom().uniform(0, 1)") == []


@pytest.mark.parametrize("path", LIBRARY, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_room_draws_from_the_global_generator(path: Path) -> None:
    draws = global_draws(path.read_text())
    # ``torch.random.get_rng_state`` is an attribute of torch, seen here as ``torch.random``, not as ``random.x``.
    assert draws == []


def test_a_save_that_waits_for_the_catalog_leaves_every_generator_as_it_was(tmp_path: Path) -> None:
    state = {"w": torch.ones(1000), "a": np.ones(10)}
    with ckptfmt.open(tmp_path / "r") as repo, repo.checkpointer("run") as ckpt:
        first = ckpt.save(state, step=0)
        assert first is not None
        first.wait()
        before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
        busy = threading.Event()
        done = threading.Event()

        def hold() -> None:
            connection = sqlite3.connect(tmp_path / "r" / "catalog.sqlite", isolation_level=None)
            connection.execute("BEGIN IMMEDIATE")
            busy.set()
            done.wait(10)
            connection.execute("ROLLBACK")
            connection.close()

        holder = threading.Thread(target=hold)
        holder.start()
        busy.wait(10)
        second = ckpt.save(state, step=1)
        assert second is not None
        time.sleep(0.3)
        assert second.generation_id is None  # it waits for the lock
        done.set()
        holder.join()
        second.wait()
        after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert after == before
