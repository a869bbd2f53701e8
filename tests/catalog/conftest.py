"""A catalog database per test, copied from one that was migrated once."""

from __future__ import annotations

import re
import shutil
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ckptfmt.catalog.clock import to_text
from ckptfmt.catalog.open import open_catalog
from ckptfmt.catalog.schema import metadata
from ckptfmt.ports.catalog import Catalog
from ckptfmt.testing.catalogs import OTHER_REPOSITORY, REPOSITORY, MakeCatalog, RawSql

if TYPE_CHECKING:
    from postgres_rig import PostgresServer


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new catalog that knows both repositories. Not to be changed."""
    path = tmp_path_factory.mktemp("catalog") / "catalog.sqlite"
    for uuid in (REPOSITORY, OTHER_REPOSITORY):
        open_catalog(f"sqlite:///{path}", repository=uuid, display_url="/ckpts", mode="w", create=True).close()
    return path


@pytest.fixture
def database(migrated: Path, tmp_path: Path) -> Path:
    """This test's own database."""
    return Path(shutil.copy(migrated, tmp_path / "catalog.sqlite"))


@pytest.fixture
def url(database: Path) -> str:
    return f"sqlite:///{database}"


@pytest.fixture
def make_catalog(url: str) -> Iterator[MakeCatalog]:
    opened: list[Catalog] = []

    def make(*, repository: str = REPOSITORY, mode: str = "w") -> Catalog:
        catalog = open_catalog(
            url, repository=repository, display_url="/ckpts", mode="r" if mode == "r" else "w", create=False
        )
        opened.append(catalog)
        return catalog

    yield make
    for catalog in opened:
        catalog.close()


@pytest.fixture
def raw(database: Path) -> RawSql:
    def run(sql: str, parameters: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        values = {key: to_text(v) if isinstance(v, datetime) else v for key, v in parameters.items()}
        with closing(sqlite3.connect(database)) as connection, connection:
            return connection.execute(sql, values).fetchall()

    return run


# -- PostgreSQL: a module of tests puts these in the place of those above ---------------------------------
@pytest.fixture(scope="session")
def pg_template(postgres: PostgresServer) -> str:
    """A database whose catalog knows both repositories."""
    name = postgres.new_database()
    for uuid in (REPOSITORY, OTHER_REPOSITORY):
        url = postgres.url(name)
        open_catalog(url, repository=uuid, display_url="/ckpts", mode="w", create=True).close()
    return name


@pytest.fixture
def pg_database(postgres: PostgresServer, pg_template: str) -> Iterator[str]:
    """This test's own copy of it, by name."""
    name = postgres.new_database(pg_template)
    yield name
    postgres.run(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(scope="session")
def pg_shared(postgres: PostgresServer, pg_template: str) -> str:
    """A database for test after test, by name: to copy one takes a fifth of a second."""
    return postgres.new_database(pg_template)


@pytest.fixture
def pg_emptied(postgres: PostgresServer, pg_shared: str) -> str:
    """The same as a copy of the template, for tests that leave the schema as it is."""
    tables = ", ".join(set(metadata.tables) - {"catalog_meta"})
    known = ", ".join(f"('{uuid}', '/ckpts', now())" for uuid in (REPOSITORY, OTHER_REPOSITORY))
    postgres.run(
        f"SET session_replication_role = replica; TRUNCATE {tables} RESTART IDENTITY; "
        f"INSERT INTO repositories (uuid, url, created_at) VALUES {known}; UPDATE catalog_meta SET epoch = 1",
        database=pg_shared,
    )
    return pg_shared


@pytest.fixture
def pg_url(postgres: PostgresServer, pg_database: str) -> str:
    return postgres.url(pg_database)


@pytest.fixture
def pg_make_catalog(pg_url: str) -> MakeCatalog:
    def make(*, repository: str = REPOSITORY, mode: str = "w") -> Catalog:
        return open_catalog(
            pg_url, repository=repository, display_url="/ckpts", mode="r" if mode == "r" else "w", create=False
        )

    return make


@pytest.fixture
def pg_raw(postgres: PostgresServer, pg_database: str) -> RawSql:
    def run(sql: str, parameters: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        return postgres.run(re.sub(r"(?<!:):(\w+)", r"%(\1)s", sql), database=pg_database, **parameters)

    return run


@pytest.fixture(scope="session")
def mortal() -> Iterator[PostgresServer]:
    """A server that may be killed: it waits for its disk. Whoever ends it starts it again."""
    from postgres_rig import postgres_server

    with postgres_server(fsync=True) as server:
        yield server
