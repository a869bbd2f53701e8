"""Message boards: the same promises in the catalog and in each store of torch.distributed."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from meeting_rig import is_stopped, store_process, wait_until

import ckptfmt
from ckptfmt.engine.save.boards import CatalogBoard, PatientBoard, await_posts
from ckptfmt.errors import CatalogError
from ckptfmt.ports.coordination import COMMON, STORE_GONE, Board
from ckptfmt.torch.store import StoreBoard

WORLD = 4


@pytest.fixture
def catalog_board(root: Path) -> Iterator[Board]:
    with ckptfmt.open(root) as repository:
        checkpointer = repository.checkpointer("run")
        launch = checkpointer._context.launch
        yield CatalogBoard(repository._connection.site.sql(), launch.id, world_size=WORLD, pause=0.02)


@pytest.fixture(params=["catalog", "hash", "file", "tcp", "patient"])
def board(request: pytest.FixtureRequest, tmp_path: Path) -> Board:
    if request.param == "catalog":
        found: Board = request.getfixturevalue("catalog_board")
        return found
    stores: dict[str, Callable[[], Any]] = {
        "hash": dist.HashStore,
        "file": lambda: dist.FileStore(str(tmp_path / "store"), WORLD),
        "tcp": lambda: dist.TCPStore("127.0.0.1", request.getfixturevalue("agent"), is_master=False),
    }
    stores["patient"] = stores["tcp"]
    made = StoreBoard(stores[request.param](), f"ckptfmt/{tmp_path}", world_size=WORLD)
    return PatientBoard(made) if request.param == "patient" else made


def test_whoever_posts_first_decides(board: Board) -> None:
    assert board.peek("save/0/x", [COMMON]) == {}
    assert board.post("save/0/x", COMMON, {"step": 5, "text": "ünï \" '"}) == {"step": 5, "text": "ünï \" '"}
    assert board.post("save/0/x", COMMON, {"step": 6}) == {"step": 5, "text": "ünï \" '"}
    assert board.peek("save/0/x", [COMMON]) == {COMMON: {"step": 5, "text": "ünï \" '"}}


def test_what_is_there_and_whether_it_is_all(board: Board) -> None:
    for rank in (0, 2):
        board.post("part", rank, {"rank": rank})
    assert board.complete("part", range(WORLD)) is None
    assert board.peek("part", range(WORLD)) == {0: {"rank": 0}, 2: {"rank": 2}}
    for rank in (3, 1):
        board.post("part", rank, {"rank": rank})
    assert board.complete("part", range(WORLD)) == {rank: {"rank": rank} for rank in range(WORLD)}
    assert board.complete("part", [2]) == {2: {"rank": 2}}
    assert board.complete("nobody", []) == {}


def test_what_was_forgotten_may_be_posted_anew(board: Board) -> None:
    board.post("a", 1, {"n": 1})
    board.post("b", 1, {"n": 2})
    board.forget("a", [1])
    board.forget("a", [1])
    assert board.peek("a", [1]) == {}
    assert board.peek("b", [1]) == {1: {"n": 2}}
    assert board.post("a", 1, {"n": 3}) == {"n": 3}


def test_many_at_once_agree(board: Board) -> None:
    """Threads of one process, which share the board as the saves and the council of a rank do."""
    if isinstance(board, StoreBoard):
        board = PatientBoard(board)
    stands: list[Any] = []
    threads = [
        threading.Thread(target=lambda n=n: stands.append(board.post("race", COMMON, {"n": n})["n"])) for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(stands) == 8
    assert len(set(stands)) == 1


def test_waiting_ends_with_the_last_message_or_in_time(board: Board) -> None:
    began = time.monotonic()
    assert await_posts(board, "late", [0, 1], until=began + 0.3) is None
    assert 0.3 <= time.monotonic() - began < 5
    board.post("late", 0, {})
    board.post("late", 1, {})
    assert await_posts(board, "late", [0, 1], until=time.monotonic()) == {0: {}, 1: {}}


@pytest.fixture
def server() -> Iterator[subprocess.Popen[str]]:
    with store_process() as agent:
        yield agent


@pytest.mark.slow
def test_a_store_that_stops_is_silent_and_comes_back(server: subprocess.Popen[str]) -> None:
    """No call hangs for longer than it may, and training never waits for it: these are background threads."""
    assert server.stdout is not None
    store = dist.TCPStore("127.0.0.1", int(server.stdout.readline()), is_master=False, timeout=timedelta(seconds=60))
    inner = StoreBoard(store, "p", world_size=WORLD)
    inner.post("a", 0, {"n": 1})
    board = PatientBoard(inner, seconds=0.5)
    server.send_signal(signal.SIGSTOP)
    try:
        wait_until(lambda: is_stopped(server.pid))
        for _ in range(3):
            began = time.monotonic()
            with pytest.raises(CatalogError, match="does not answer") as caught:
                board.peek("a", [0])
            assert caught.value.transient
            assert time.monotonic() - began < 5
    finally:
        server.send_signal(signal.SIGCONT)
    until = time.monotonic() + 20
    while True:
        try:
            assert board.peek("a", [0]) == {0: {"n": 1}}
            break
        except CatalogError:
            assert time.monotonic() < until
            time.sleep(0.05)


@pytest.mark.slow
def test_a_store_that_is_gone_is_known_at_once(server: subprocess.Popen[str]) -> None:
    assert server.stdout is not None
    store = dist.TCPStore("127.0.0.1", int(server.stdout.readline()), is_master=False)
    board = PatientBoard(StoreBoard(store, "p", world_size=WORLD))
    board.post("a", 0, {"n": 1})
    server.kill()
    server.wait(30)
    for _ in range(3):
        began = time.monotonic()
        with pytest.raises(CatalogError) as caught:
            board.post("b", 0, {})
        assert (caught.value.kind, caught.value.transient) == (STORE_GONE, False)
        assert time.monotonic() - began < 5
