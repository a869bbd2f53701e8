"""Servers and clients for the tests that run inside of a machine: ``test_nfs.py`` starts it, and them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from nfs_servers import EXPORT, KernelServer, UserServer, mount

_CACHED = ("acregmin=600", "acregmax=600", "acdirmin=600", "acdirmax=600")
"""What a client has seen it believes for longer than a test takes: only asking the server anew helps."""
_numbers = count()


@pytest.fixture(scope="session")
def kernel_server() -> KernelServer:
    return KernelServer()


@pytest.fixture(scope="session")
def user_server() -> Iterator[UserServer]:
    server = UserServer()
    yield server
    server.end()


@pytest.fixture(scope="session")
def mounts(kernel_server: KernelServer) -> tuple[Path, Path]:
    """Two clients of the kernel's server."""
    found = mount("a", "hard", *_CACHED), mount("b", "hard", *_CACHED, server="127.0.0.2")
    assert len(list(Path("/proc/fs/nfsd/clients").iterdir())) == 2
    return found


@pytest.fixture(scope="session")
def patient(user_server: UserServer) -> Path:
    """A client that waits for its server for ever."""
    return mount("hard", "hard", "timeo=10")


@pytest.fixture(scope="session")
def impatient(user_server: UserServer) -> Path:
    """A client that gives up after two seconds."""
    return mount("soft", "soft", "timeo=10", "retrans=1")


@pytest.fixture
def name() -> str:
    """A folder that is this test's, below each mount and below the export."""
    found = f"test{next(_numbers)}"
    (EXPORT / found).mkdir()
    return found
