"""What the system is short of is told as that: room, files, permission; and which of it may pass by itself."""

from __future__ import annotations

import os
import resource
import sqlite3
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckptfmt.catalog import repair, shortage
from ckptfmt.catalog.snapshot import SqliteSession
from ckptfmt.catalog.sqlite import SqliteSessions
from ckptfmt.errors import CatalogError
from ckptfmt.ports.catalog import UNWRITABLE
from ckptfmt.testing.catalogs import MakeCatalog


def _fail(monkeypatch: pytest.MonkeyPatch, code: int, text: str) -> None:
    error = sqlite3.OperationalError(text)
    error.sqlite_errorcode = code

    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(SqliteSession, "execute", fail)
    monkeypatch.setattr(SqliteSession, "rows", fail)


def _place(**facts: Any) -> Any:
    plenty = {"f_flag": 0, "f_files": 100, "f_favail": 50, "f_blocks": 100, "f_bavail": 50, "f_frsize": 4096}
    return lambda _: SimpleNamespace(**{**plenty, **facts})


def test_a_full_disk_is_told_at_once_with_what_is_left(
    make_catalog: MakeCatalog, monkeypatch: pytest.MonkeyPatch, database: Path
) -> None:
    """FR-100. The database itself says that it is full: nothing is simulated but how large it may become."""
    connect = SqliteSessions._connect

    def connect_small(self: SqliteSessions, *args: Any) -> sqlite3.Connection:
        connection = connect(self, *args)
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count={pages}")
        return connection

    monkeypatch.setattr(SqliteSessions, "_connect", connect_small)
    catalog = make_catalog()

    def fill() -> None:
        for number in range(2000):
            catalog.ensure_run(f"{'long' * 50}-{number}", f"run-{number}")

    with pytest.raises(CatalogError, match=r"disk is full: free space there \(\d+ bytes.*`ckptfmt gc`") as caught:
        fill()
    assert (caught.value.kind, caught.value.transient) == ("catalog_full", False)
    assert str(database) in str(caught.value)
    assert catalog.runs(), "it can still be read"


def test_too_many_open_files_are_told(make_catalog: MakeCatalog) -> None:
    """Of which SQLite only says that a file cannot be opened; its own it has closed by then."""
    catalog = make_catalog()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(highest)]  # no gaps below the limit
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(held) + 1, limits[1]))
        with pytest.raises(CatalogError, match="ulimit -n") as caught:
            catalog.ensure_run("new", "new-1")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in held:
            os.close(descriptor)
    assert (caught.value.kind, caught.value.transient) == ("catalog_files", True)
    assert catalog.ensure_run("new", "new-1").name == "new"


@pytest.mark.parametrize(
    ("facts", "kind", "words"),
    [
        ({"f_favail": 0}, "catalog_full", "no inodes left.*`ckptfmt gc`"),
        ({"f_bavail": 0}, "catalog_full", r"full: free space there \(0 bytes"),
        ({"f_flag": os.ST_RDONLY}, "catalog_read_only", "mounted read-only: remount"),
        ({"f_files": 0, "f_favail": 0}, "catalog", "cannot be opened: check"),
        ({}, "catalog", "cannot be opened: check"),
    ],
)
def test_why_a_file_cannot_be_opened(
    make_catalog: MakeCatalog, monkeypatch: pytest.MonkeyPatch, facts: dict[str, int], kind: str, words: str
) -> None:
    catalog = make_catalog()
    _fail(monkeypatch, sqlite3.SQLITE_CANTOPEN, "unable to open database file")
    monkeypatch.setattr(os, "statvfs", _place(**facts))
    with pytest.raises(CatalogError, match=words) as caught:
        catalog.ensure_run("new", "new-1")
    assert (caught.value.kind, caught.value.transient) == (kind, False)


def test_a_folder_that_may_not_be_written_is_told(monkeypatch: pytest.MonkeyPatch, database: Path) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    found = shortage.behind_a_refusal(database)
    assert found is not None
    assert found.kind == "catalog_read_only"
    assert str(database.parent) in found.advice
    assert shortage.behind_a_refusal(database.parent / "absent.sqlite") is None  # then that is the reason


@pytest.mark.parametrize(
    ("code", "kind", "transient"),
    [
        (sqlite3.SQLITE_READONLY, "catalog_read_only", False),
        (sqlite3.SQLITE_READONLY_DBMOVED, "catalog", False),
        (sqlite3.SQLITE_IOERR_WRITE, "catalog_io", True),
    ],
)
def test_what_refuses_a_write_has_a_kind(
    make_catalog: MakeCatalog, monkeypatch: pytest.MonkeyPatch, code: int, kind: str, transient: bool
) -> None:
    catalog = make_catalog()
    _fail(monkeypatch, code, "refused")
    with pytest.raises(CatalogError) as caught:
        catalog.ensure_run("new", "new-1")
    assert (caught.value.kind, caught.value.transient) == (kind, transient)
    assert (kind in UNWRITABLE) == (kind != "catalog")
    assert ("quota" in str(caught.value)) == (code == sqlite3.SQLITE_IOERR_WRITE)  # SQLite's word for EDQUOT


@pytest.mark.parametrize("code", [sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY])
def test_a_sound_catalog_without_room_is_not_called_damaged(
    url: str, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """A rebuild would put it aside."""
    _fail(monkeypatch, code, "refused")
    with pytest.raises(CatalogError) as caught:
        repair.condition(url)
    assert caught.value.kind in UNWRITABLE
