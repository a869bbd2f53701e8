"""What tests of several folders start from, made once, then copied, since migrating a new catalog takes long; and what
they tell at the end of the session."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from postgres_rig import PostgresServer
    from s3_rig import RcloneServer, SeaweedServer

if "PYTEST_XDIST_WORKER" in os.environ:
    # Before anything loads NumPy or torch: pools of threads that spin beside those of the other workers.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# The server of torch.distributed's store asks for the name of each client, also of this host's own, and everybody waits
# for it meanwhile: where no name server answers, 5 seconds, which is longer than what the tests wait for ranks.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

_LONG_SECONDS = 600
"""For what takes a minute on a machine with nothing else to do."""
_TOLD = pytest.StashKey[dict[str, list[str]]]()


def pytest_configure(config: pytest.Config) -> None:
    told = config.stash[_TOLD] = {}
    if config.pluginmanager.hasplugin("xdist"):
        config.pluginmanager.register(_FromWorkers(told))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("timeout") is None and any(map(item.get_closest_marker, ("slow", "long"))):
            item.add_marker(pytest.mark.timeout(_LONG_SECONDS))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):  # a worker of pytest-xdist tells the process that has the terminal
        session.config.workeroutput["told"] = session.config.stash[_TOLD]


class _FromWorkers:
    """Brings together what the workers of pytest-xdist told."""

    def __init__(self, told: dict[str, list[str]]) -> None:
        self._told = told

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        for title, lines in getattr(node, "workeroutput", {}).get("told", {}).items():
            self._told.setdefault(title, []).extend(lines)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for title, lines in config.stash[_TOLD].items():
        terminalreporter.section(title)
        for line in lines:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def tell(pytestconfig: pytest.Config) -> Callable[[str, str], None]:
    """``tell(title, line)`` adds a line to the summary of the test session."""

    def add(title: str, line: str) -> None:
        pytestconfig.stash[_TOLD].setdefault(title, []).append(line)

    return add


@pytest.fixture(scope="session")
def empty_catalog(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A catalog with its schema and nothing else."""
    from ckptfmt.catalog.upgrade import create_schema

    path = tmp_path_factory.mktemp("catalog") / "empty.sqlite"
    create_schema(f"sqlite:///{path}")
    return path


@pytest.fixture(scope="session")
def empty_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository on disk in which nothing was ever saved."""
    import ckptfmt

    root = tmp_path_factory.mktemp("repository") / "r"
    ckptfmt.open(root).close()
    return root


@pytest.fixture
def quick() -> Iterator[None]:
    """Nothing in this test survives a power cut, so its transactions don't wait for the disk."""
    from quick_catalogs import quick_catalogs

    with quick_catalogs():
        yield


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server for tests that leave it running. It does not wait for its disk."""
    from postgres_rig import postgres_server

    with postgres_server() as server:
        yield server


@pytest.fixture(scope="session")
def postgres_template(postgres: PostgresServer) -> str:
    """A database of that server with the schema and nothing else, for ``new_database`` to copy."""
    from postgres_rig import migrated_database

    return migrated_database(postgres)


@pytest.fixture
def postgres_catalog(postgres: PostgresServer, postgres_template: str) -> str:
    """The URL of a catalog with its schema and nothing else, on that server, for this test alone."""
    return postgres.url(postgres.new_database(postgres_template))


@pytest.fixture(scope="session")
def seaweed() -> Iterator[SeaweedServer]:
    """An S3 server for tests that leave it running."""
    from s3_rig import SeaweedServer, s3_server

    with s3_server(SeaweedServer) as server:
        yield server


@pytest.fixture(scope="session")
def rclone() -> Iterator[RcloneServer]:
    """An S3 server that heeds no condition, for tests that leave it running."""
    from s3_rig import RcloneServer, s3_server

    with s3_server(RcloneServer) as server:
        yield server
