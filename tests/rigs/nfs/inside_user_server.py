"""A server that is killed and comes back: a hard mount waits for it, a soft one fails, and neither loses an object."""

from __future__ import annotations

import contextlib
import errno
import mmap
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from inside_conformance import OnNfs
from nfs_servers import EXPORT, UserServer
from rig_jobs import Facts, Place, examine, state_of

from ckptfmt.backends.posix import PosixBackend
from ckptfmt.backends.syscalls import Syscalls
from ckptfmt.checkpointer import Checkpointer
from ckptfmt.errors import BackendError, InvalidInput, NotFound, SaveFailed
from ckptfmt.testing.syscalls import SystemCall, WatchedSyscalls

DATA = random.Random(0).randbytes(3_000_001)


class TestUserServer(OnNfs):
    @pytest.fixture
    def backend(self, patient: Path, name: str) -> PosixBackend:
        backend = PosixBackend(patient / name)
        backend.create_root()
        return backend


@pytest.fixture(autouse=True)
def _server_runs(user_server: UserServer) -> Iterator[None]:
    yield
    if not user_server.runs:
        user_server.start()


def at(mount: Path, name: str) -> tuple[PosixBackend, WatchedSyscalls]:
    calls = WatchedSyscalls()
    backend = PosixBackend(mount / name, syscalls=calls)
    backend.make_folder("f")
    calls.clear()
    return backend, calls


def before_first(name: str, act: Callable[[], None]) -> Callable[[SystemCall], None]:
    """A hook that does ``act`` before the first call of that name."""
    left = [act]

    def hook(call: SystemCall) -> None:
        if call.name == name and left:
            left.pop()()

    return hook


def put(backend: PosixBackend, key: str, step: int = 1 << 20) -> None:
    writer = backend.open_writer(key, len(DATA))
    try:
        for start in range(0, len(DATA), step):
            writer.write_at(start, DATA[start : start + step])
        writer.finish()
    except BackendError:
        with contextlib.suppress(BackendError):
            writer.abort()
        raise


# -- a mount that waits -----------------------------------------------------------------------------
@pytest.mark.parametrize("moment", ["pwrite", "fsync", "pread_into"])
def test_a_hard_mount_waits_and_completes_an_object(
    patient: Path, name: str, user_server: UserServer, moment: str
) -> None:
    backend, calls = at(patient, name)
    calls.on_call(before_first(moment, user_server.restart))
    put(backend, "f/x")
    assert (EXPORT / name / "f/x").read_bytes() == DATA


@pytest.mark.parametrize("moment", ["fsync", "link"])
def test_a_hard_mount_waits_and_creates_exactly_once(
    patient: Path, name: str, user_server: UserServer, moment: str
) -> None:
    backend, calls = at(patient, name)
    calls.on_call(before_first(moment, user_server.restart))
    backend.create("f/x", DATA)
    assert [path.name for path in (EXPORT / name / "f").iterdir()] == ["x"]
    assert (EXPORT / name / "f/x").read_bytes() == DATA


def test_an_object_that_was_replaced_while_its_server_was_away_is_opened_anew(
    patient: Path, name: str, user_server: UserServer
) -> None:
    """The server that comes back does not know the handle any more: ESTALE, from a real one."""
    backend, calls = at(patient, name)
    put(backend, "f/x")
    path = EXPORT / name / "f/x"

    def replace() -> None:
        user_server.kill()
        path.unlink()
        path.write_bytes(DATA)
        user_server.start()

    calls.clear()
    calls.on_call(before_first("pread_into", replace))
    page = mmap.mmap(-1, len(DATA))
    backend.read_into("f/x", 0, memoryview(page)[: len(DATA)])
    assert page[: len(DATA)] == DATA
    assert calls.trace("open") == [("open", "x")] * 2
    assert calls.left_open == []


def test_an_object_that_went_while_its_server_was_away_is_absent(
    patient: Path, name: str, user_server: UserServer
) -> None:
    backend, _ = at(patient, name)
    put(backend, "f/x")
    assert backend.head("f/x").nbytes == len(DATA)
    user_server.kill()
    (EXPORT / name / "f/x").unlink()
    user_server.start()
    with pytest.raises(NotFound):
        backend.read("f/x", limit=len(DATA))
    with pytest.raises(NotFound):
        backend.head("f/x")
    assert backend.list("") == []


def save(checkpointer: Checkpointer, step: int) -> None:
    pending = checkpointer.save(state_of(step), step=step)
    assert pending is not None
    pending.result(90)


def catalog_of(name: str) -> Path:
    """A catalog on the host's disk."""
    Path("/mnt/disk/local").mkdir(exist_ok=True)
    return Path("/mnt/disk/local") / f"{name}.sqlite"


def act_before_first(monkeypatch: pytest.MonkeyPatch, name: str, act: Callable[[], None]) -> list[Callable[[], None]]:
    """Do ``act`` before the first call of that name that any backend makes from now on; empty once it was done."""
    call, left = getattr(Syscalls, name), [act]

    def acting(*arguments: Any) -> Any:
        if left:
            left.pop()()
        return call(*arguments)

    monkeypatch.setattr(Syscalls, name, acting)
    return left


@pytest.mark.parametrize("moment", ["pwrite", "link"])
def test_a_save_waits_for_its_server(
    patient: Path, name: str, user_server: UserServer, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(patient / name / "r", catalog_of(name))
    with place.open() as repository, repository.checkpointer("run") as checkpointer:
        save(checkpointer, 1)
        left = act_before_first(monkeypatch, moment, user_server.restart)
        save(checkpointer, 2)
        assert not left
    assert examine(place, Facts(must={"run": {1, 2}})) == []


# -- a mount that gives up --------------------------------------------------------------------------
@pytest.mark.parametrize("moment", ["pwrite", "fsync"])
def test_a_soft_mount_fails_and_the_object_is_dead(
    impatient: Path, name: str, user_server: UserServer, moment: str
) -> None:
    backend, calls = at(impatient, name)
    backend.create("f/kept", b"kept")
    calls.clear()
    calls.on_call(before_first(moment, user_server.kill))
    writer = backend.open_writer("f/x", len(DATA))
    began = time.monotonic()
    with pytest.raises(BackendError, match="f/x") as caught:  # noqa: PT012 - whichever meets the dead server
        for start in range(0, len(DATA), 1 << 20):
            writer.write_at(start, DATA[start : start + (1 << 20)])
        writer.finish()
    assert time.monotonic() - began < 60
    assert caught.value.errno in (errno.EIO, errno.ETIMEDOUT)
    assert caught.value.transient
    with pytest.raises(InvalidInput, match="new name"):
        writer.finish()
    user_server.start()
    wait_for(lambda: put(backend, "f/y"))
    writer.abort()
    assert {info.key: info.nbytes for info in backend.list("")} == {"f/kept": 4, "f/y": len(DATA)}
    assert (EXPORT / name / "f/y").read_bytes() == DATA
    assert backend.read("f/kept", limit=4) == b"kept"


@pytest.mark.parametrize("moment", ["fsync"])
def test_a_save_that_lost_its_server_fails_and_the_next_one_is_whole(
    impatient: Path, name: str, user_server: UserServer, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(impatient / name / "r", catalog_of(name))
    with place.open() as repository, repository.checkpointer("run", commit_timeout=10) as checkpointer:
        save(checkpointer, 1)
        left = act_before_first(monkeypatch, moment, user_server.kill)
        with pytest.raises(SaveFailed, match=name) as caught:
            save(checkpointer, 2)
        assert not left
        assert "Input/output error" in str(caught.value) or "timed out" in str(caught.value)
        user_server.start()
        wait_for(lambda: place.open(mode="r").close())
        save(checkpointer, 3)
    assert examine(place, Facts(must={"run": {1, 3}}, never={"run": {2}})) == []


def wait_for(call: Callable[[], Any]) -> None:
    """Repeat a call while it fails for a passing reason, as whoever saves does."""
    until = time.monotonic() + 60
    while True:
        try:
            return call()
        except BackendError as error:
            if not error.transient or time.monotonic() > until:
                raise
        time.sleep(0.2)
