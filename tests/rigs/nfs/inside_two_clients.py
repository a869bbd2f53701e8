"""What one client does, another sees at once, whatever its cache holds; and what NFS leaves behind harms nobody."""

from __future__ import annotations

import errno
import mmap
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from nfs_servers import EXPORT

from ckptfmt.backends.posix import PosixBackend, PosixOptions
from ckptfmt.errors import BackendError, CkptError, Conflict, NotFound
from ckptfmt.testing.syscalls import SystemCall, WatchedSyscalls

DATA = random.Random(0).randbytes(1_000_003)


@dataclass
class Clients:
    """Two backends on one folder, each behind a mount of its own, and the folder as the server has it."""

    one: PosixBackend
    other: PosixBackend
    calls: WatchedSyscalls
    """The other's."""
    server: Path

    @property
    def place(self) -> Path:
        """Where the other client's mount has the folder."""
        return Path(self.other.url.removeprefix("file://"))


@pytest.fixture
def clients(mounts: tuple[Path, Path], name: str) -> Clients:
    calls = WatchedSyscalls()
    one, other = PosixBackend(mounts[0] / name), PosixBackend(mounts[1] / name, syscalls=calls)
    one.make_folder("f")
    assert other.has_folder("f")
    return Clients(one, other, calls, EXPORT / name)


def put(backend: PosixBackend, key: str, data: bytes = DATA, step: int = 1 << 16) -> None:
    writer = backend.open_writer(key, len(data))
    for at in range(0, len(data), step):
        writer.write_at(at, data[at : at + step])
    writer.finish()


def read_range(backend: PosixBackend, key: str, nbytes: int = len(DATA)) -> bytes:
    page = mmap.mmap(-1, max(nbytes, 1))
    backend.read_into(key, 0, memoryview(page)[:nbytes])
    return page[:nbytes]


# -- names that a client calls absent ---------------------------------------------------------------
LOOKS: dict[str, Callable[[PosixBackend], Any]] = {
    "head": lambda backend: backend.head("f/g/x").nbytes == len(DATA),
    "read": lambda backend: backend.read("f/g/x", limit=len(DATA)) == DATA,
    "read_into": lambda backend: read_range(backend, "f/g/x") == DATA,
    "has_folder": lambda backend: backend.has_folder("f/g"),
    "list": lambda backend: [info.key for info in backend.list("f")] == ["f/g/x"],
    "list the folder": lambda backend: [info.key for info in backend.list("f/g")] == ["f/g/x"],
    "list_folders": lambda backend: backend.list_folders("f") == ["g"],
    "create": lambda backend: backend.create("f/g/y", b"1") is None,
    "create again": lambda backend: backend.create("f/g/x", DATA) is None,
    "write": lambda backend: put(backend, "f/g/y") is None,
    "make_folder": lambda backend: backend.make_folder("f/g/h") is None,
    "delete": lambda backend: backend.delete("f/g/x") is None,
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_what_another_client_made_is_not_absent(clients: Clients, look: Callable[[PosixBackend], Any]) -> None:
    for key in ("f/g", "f/g/x"):
        assert not (clients.place / key).exists()
    assert clients.other.list("f") == []
    clients.one.make_folder("f/g")
    put(clients.one, "f/g/x")
    assert not (clients.place / "f/g").exists()  # so far the client trusts its cache, and this test is worth something
    assert look(clients.other)
    assert (clients.server / "f/g/x").exists() == (look is not LOOKS["delete"])


def test_an_object_in_a_folder_that_is_known_is_not_absent(clients: Clients) -> None:
    for key in ("f/x", "f/y", "f/z"):
        with pytest.raises(NotFound):
            clients.other.head(key)
        put(clients.one, key)
        assert not (clients.place / key).exists()
    assert clients.other.head("f/x").nbytes == len(DATA)
    clients.other.delete("f/y")
    assert not (clients.server / "f/y").exists()
    with pytest.raises(Conflict):
        clients.other.create("f/z", b"else")
    with pytest.raises(Conflict):
        clients.other.open_writer("f/z", 1)


def test_what_is_absent_is_asked_for_once_more_and_not_again(clients: Clients) -> None:
    clients.calls.clear()
    with pytest.raises(NotFound):
        clients.other.read("f/x", limit=1)
    assert clients.calls.trace("open") == [("open", "x"), ("open", "x")]


# -- names that a client calls present --------------------------------------------------------------
def test_what_another_client_deleted_is_absent(clients: Clients) -> None:
    for key in ("f/x", "f/y", "f/z"):
        put(clients.one, key)
        assert clients.other.read(key, limit=len(DATA)) == DATA
    with (clients.place / "f/y").open("rb"):  # the client keeps what it has of it
        for key in ("f/x", "f/y", "f/z"):
            clients.one.delete(key)
        for look in (clients.other.head, lambda key: clients.other.read(key, limit=len(DATA)), clients.other.delete):
            for key in ("f/x", "f/y"):
                if look == clients.other.delete:
                    look(key)
                    continue
                with pytest.raises(NotFound):
                    look(key)
    clients.other.create("f/z", b"new")
    put(clients.other, "f/x")
    assert clients.one.read("f/z", limit=3) == b"new"
    assert clients.one.head("f/x").nbytes == len(DATA)
    assert [info.key for info in clients.other.list("")] == ["f/x", "f/z"]


def test_a_descriptor_that_went_stale_is_opened_anew(clients: Clients) -> None:
    """Another client removes the object and puts it back while it is read."""
    put(clients.one, "f/x")

    def replace(call: SystemCall) -> None:
        if call.name == "pread_into" and call.nth == 1:
            clients.one.delete("f/x")
            put(clients.one, "f/x")

    clients.calls.clear()
    clients.calls.on_call(replace)
    assert read_range(clients.other, "f/x") == DATA
    assert clients.calls.left_open == []


def test_an_object_that_grew_is_as_long_as_the_server_says(clients: Clients) -> None:
    """A client that has looked at an unfinished object does not hold its length against the finished one."""
    writer = clients.one.open_writer("f/x", len(DATA))
    assert clients.other.head("f/x").nbytes != len(DATA)
    assert (clients.place / "f/x").stat().st_size != len(DATA)
    writer.write_at(0, DATA)
    writer.finish()
    assert (clients.place / "f/x").stat().st_size != len(DATA)  # as the client has it in mind
    assert clients.other.head("f/x").nbytes == len(DATA)
    assert read_range(clients.other, "f/x") == DATA


# -- what NFS leaves behind -------------------------------------------------------------------------
def test_leftovers_of_open_files_are_nobodys_objects(clients: Clients) -> None:
    clients.one.make_folder("f/g")
    put(clients.other, "f/g/x")
    with (clients.place / "f/g/x").open("rb") as file:
        clients.other.delete("f/g/x")
        left = [entry.name for entry in (clients.server / "f/g").iterdir()]
        assert len(left) == 1
        assert left[0].startswith(".nfs")
        for backend in (clients.one, clients.other):
            assert backend.list("") == backend.list("f/g") == []
            assert backend.list_folders("f/g") == []
            assert backend.sweep_debris("", dry_run=False) == []
            backend.delete("f/g/x")
            with pytest.raises(NotFound):
                backend.head("f/g/x")
        put(clients.other, "f/g/x", b"new")
        assert clients.one.read("f/g/x", limit=3) == b"new"
        assert file.read() == DATA
    until = time.monotonic() + 20
    while [entry.name for entry in (clients.server / "f/g").iterdir()] != ["x"]:  # the client removes it when it likes
        assert time.monotonic() < until


# -- what is called durable -------------------------------------------------------------------------
def damage(server: Path, at: int) -> None:
    with server.open("r+b") as file:
        file.seek(at)
        file.write(b"!")


@pytest.mark.parametrize("direct", [None, False])
@pytest.mark.parametrize("at", [0, 70_000, len(DATA) - 1])
def test_what_the_server_has_is_read_back_before_an_object_is_durable(
    clients: Clients, at: int, direct: bool | None
) -> None:
    """The server loses a byte after it has acknowledged it; the client's cache still has it."""
    backend = PosixBackend(clients.place, PosixOptions(direct=direct), syscalls=clients.calls)
    left = ["f/x"]

    def damage_synced(call: SystemCall) -> None:
        if call.name == "close" and call.path.endswith("/f/x") and left:
            damage(clients.server / left.pop(), at)

    clients.calls.on_call(damage_synced)
    writer = backend.open_writer("f/x", len(DATA))
    for start in range(0, len(DATA), 50_000):
        writer.write_at(start, DATA[start : start + 50_000])
    with pytest.raises(BackendError, match="f/x at offset") as caught:
        writer.finish()
    assert (caught.value.kind, caught.value.transient) == ("read_back", True)
    writer.abort()
    assert clients.calls.left_open == []
    assert list((clients.server / "f").iterdir()) == []
    put(backend, "f/y")
    assert (clients.server / "f/y").read_bytes() == DATA


def test_a_small_object_is_read_back_before_it_gets_its_name(clients: Clients) -> None:
    def damage_synced(call: SystemCall) -> None:
        if call.name == "close" and ".ckptfmt-tmp-" in call.path and call.nth == 1:
            damage(clients.server / "f" / Path(call.path).name, 5)

    clients.calls.clear()

    clients.calls.on_call(damage_synced)
    with pytest.raises(BackendError, match=r"create .*/f/x at offset 0") as caught:
        clients.other.create("f/x", DATA)
    assert caught.value.kind == "read_back"
    assert list((clients.server / "f").iterdir()) == []


def test_traits_tell_the_truth(clients: Clients) -> None:
    traits = clients.one.traits
    assert (traits.local, traits.survives_power_loss, traits.folders) == (False, True, True)
    assert "read back" in traits.durable
    buffered = PosixBackend(clients.place, PosixOptions(read_back=False))
    assert "read back" not in buffered.traits.durable


def test_reads_and_writes_go_past_the_cache(clients: Clients) -> None:
    page = memoryview(mmap.mmap(-1, 1 << 20))
    writer = clients.other.open_writer("f/x", len(page))
    writer.write_at(0, page)
    writer.finish()
    opened = clients.calls.trace("open")
    assert opened.count(("open", "x")) == 3  # to write, to write past the cache, to read back past it


def test_a_client_that_may_not_is_told_so(clients: Clients) -> None:
    (clients.server / "f").chmod(0o500)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            try:
                clients.other.create("f/x", b"1")
            except CkptError as error:
                code = 0 if getattr(error, "errno", None) == errno.EACCES else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
