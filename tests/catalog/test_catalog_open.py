"""Opening: what is created, what is refused, and what is never imported."""

from __future__ import annotations

import logging
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy.engine import make_url

from ckptfmt.catalog import filesystems
from ckptfmt.catalog.location import display, sqlite_path, sqlite_url
from ckptfmt.catalog.open import open_catalog
from ckptfmt.catalog.sqlite import journal_mode
from ckptfmt.errors import CatalogError, InvalidInput, NotFound
from ckptfmt.ports.catalog import Catalog
from ckptfmt.testing.catalogs import REPOSITORY, RawSql


def _open(url: str, mode: str = "w", *, create: bool = False, repository: str = REPOSITORY) -> Catalog:
    return open_catalog(
        url, repository=repository, display_url="/ckpts", mode="r" if mode == "r" else "w", create=create
    )


def test_create_open_and_read(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/a b%c#d?.sqlite".replace("?", "%3F")
    created = _open(url, create=True)
    assert _open(url).identity() == created.identity() == _open(url, "r").identity()
    assert len(created.identity().uuid) == 36


def test_two_databases_have_two_identities(tmp_path: Path) -> None:
    first, second = (_open(f"sqlite:///{tmp_path}/{name}.sqlite", create=True) for name in "ab")
    assert first.identity().uuid != second.identity().uuid


@pytest.mark.parametrize("mode", ["r", "w"])
def test_a_missing_database_is_not_created(tmp_path: Path, mode: str) -> None:
    with pytest.raises(NotFound, match="no catalog"):
        _open(f"sqlite:///{tmp_path}/none.sqlite", mode)
    assert list(tmp_path.iterdir()) == []


def test_reading_never_creates(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        _open(f"sqlite:///{tmp_path}/none.sqlite", "r", create=True)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match=f"create {tmp_path}/none"):
        _open(f"sqlite:///{tmp_path}/none/catalog.sqlite", create=True)


def test_an_unknown_repository_is_not_registered_silently(url: str, raw: RawSql) -> None:
    for mode in ("r", "w"):
        with pytest.raises(NotFound, match="does not know the repository"):
            _open(url, mode, repository="stranger")
    assert raw("SELECT COUNT(*) FROM repositories WHERE uuid = 'stranger'", {}) == [(0,)]


def test_a_moved_repository_keeps_its_rows(url: str, raw: RawSql) -> None:
    for place in ("/old", "/new"):
        catalog = open_catalog(url, repository=REPOSITORY, display_url=place, mode="w", create=True)
        assert catalog.root_url() != place
        catalog.moved_to(place)
        assert catalog.root_url() == place
    assert raw("SELECT url FROM repositories WHERE uuid = :uuid", {"uuid": REPOSITORY}) == [("/new",)]


def test_reading_changes_no_byte(url: str, database: Path) -> None:
    before = database.read_bytes(), database.stat().st_mtime_ns
    catalog = _open(url, "r")
    catalog.generations()
    catalog.view("commit_lag")
    assert (database.read_bytes(), database.stat().st_mtime_ns) == before
    assert sorted(path.name for path in database.parent.iterdir()) == ["catalog.sqlite"]


def test_a_foreign_database_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "other.sqlite"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE alembic_version (version_num VARCHAR(32))")
        connection.execute("INSERT INTO alembic_version VALUES ('abc')")
    before = path.read_bytes()
    for mode, create in (("r", False), ("w", False), ("w", True)):
        with pytest.raises(CatalogError, match=r"something else \(alembic_version") as caught:
            _open(f"sqlite:///{path}", mode, create=create)
        assert caught.value.kind == "catalog_foreign"
    assert path.read_bytes() == before


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    path = tmp_path / "text.sqlite"
    path.write_text("this is not a database, only a long enough line of text" * 40)
    for mode in ("r", "w"):
        with pytest.raises(CatalogError, match="not a SQLite database"):
            _open(f"sqlite:///{path}", mode)


@pytest.mark.parametrize(
    ("revision", "kind", "advice"),
    [
        ("0000", "catalog_older", "ckptfmt db upgrade sqlite:///"),
        ("9999", "catalog_newer", "upgrade ckptfmt"),
        ("f00d", "catalog_foreign", "backup"),
    ],
)
def test_another_schema_revision(url: str, raw: RawSql, revision: str, kind: str, advice: str) -> None:
    raw("UPDATE ckptfmt_alembic_version SET version_num = :revision", {"revision": revision})
    for mode, create in (("r", False), ("w", False), ("w", True)):
        with pytest.raises(CatalogError, match=advice) as caught:
            _open(url, mode, create=create and revision != "0000")
        assert caught.value.kind == kind


def test_an_empty_file_without_create(tmp_path: Path) -> None:
    (tmp_path / "empty.sqlite").touch()
    with pytest.raises(CatalogError, match="db upgrade"):
        _open(f"sqlite:///{tmp_path}/empty.sqlite")
    assert _open(f"sqlite:///{tmp_path}/empty.sqlite", create=True).runs() == []


def test_four_processes_create_one_schema(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/catalog.sqlite"
    code = """
import sys
from ckptfmt.catalog.open import open_catalog
catalog = open_catalog(sys.argv[1], repository="repo", display_url="/ckpts", mode="w", create=True)
print(catalog.identity().uuid)
"""
    command = [sys.executable, "-c", code, url]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    answers = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, answers
    assert len({out for out, _ in answers}) == 1
    with closing(sqlite3.connect(tmp_path / "catalog.sqlite")) as connection:
        assert connection.execute("SELECT COUNT(*) FROM ckptfmt_alembic_version").fetchall() == [(1,)]
        assert connection.execute("SELECT uuid FROM repositories").fetchall() == [("repo",)]


def test_opening_an_existing_catalog_imports_neither_alembic_nor_sqlalchemy(url: str) -> None:
    code = f"""
import sys
from ckptfmt.catalog.open import open_catalog
for mode, create in (("r", False), ("w", False), ("w", True)):
    open_catalog({url!r}, repository={REPOSITORY!r}, display_url="/ckpts", mode=mode, create=create).runs()
heavy = [name for name in ("alembic", "sqlalchemy", "numpy", "torch") if name in sys.modules]
assert not heavy, heavy
import ckptfmt.catalog.upgrade
assert "alembic" not in sys.modules
assert not {{"catalog", "migrations"}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", ["nfs4", "nfs", "lustre", "fuse.s3fs", "cifs", "gpfs", "9p", "ceph", "unknown"])
def test_network_file_systems_are_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(CatalogError, match=f"{kind} file system.*PostgreSQL") as caught:
        open_catalog(
            f"sqlite:///{tmp_path}/catalog.sqlite",
            repository=REPOSITORY,
            display_url="/ckpts",
            mode="w",
            create=True,
            filesystem=lambda path: kind,
        )
    assert caught.value.kind == "catalog_filesystem"
    assert list(tmp_path.iterdir()) == []


def test_a_volatile_file_system_is_warned_about(url: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="ckptfmt"):
        open_catalog(
            url,
            repository=REPOSITORY,
            display_url="/ckpts",
            mode="w",
            create=False,
            filesystem=lambda path: "tmpfs",
        )
    assert "lost at the next reboot" in caplog.text


_MOUNTS = r"""22 1 259:1 / / rw,relatime shared:1 - ext4 /dev/root rw
30 22 0:26 / /mnt/my\040nfs rw,relatime shared:9 - nfs4 server:/x rw,vers=4.2
31 22 0:27 / /scratch rw - ext4 /dev/sdb rw
32 22 0:28 / /scratch rw - lustre mgs@tcp:/s rw
33 22 0:29 / /scratch/local rw master:2 propagate_from:1 - xfs /dev/nvme0n1 rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/data/a/catalog.sqlite", "ext4"),
        ("/mnt/my nfs/c.sqlite", "nfs4"),
        ("/mnt/my nfsx/c.sqlite", "ext4"),
        ("/scratch/c.sqlite", "lustre"),
        ("/scratch/local/c.sqlite", "xfs"),
        ("/scratch/local2/c.sqlite", "lustre"),
    ],
)
def test_the_mount_table_is_read_as_the_kernel_means_it(path: str, kind: str) -> None:
    assert filesystems.from_mountinfo(_MOUNTS, path) == kind


def test_the_mount_listing_of_macos() -> None:
    listing = (
        "/dev/disk3s1s1 on / (apfs, sealed, local, read-only, journaled)\n"
        "/dev/disk3s5 on /System/Volumes/Data (apfs, local, journaled)\n"
        "//user@server/share on /Volumes/my share (smbfs, nodev)\n"
    )
    assert filesystems.from_mount_listing(listing, "/Volumes/my share/c.sqlite") == "smbfs"
    assert filesystems.from_mount_listing(listing, "/System/Volumes/Data/c.sqlite") == "apfs"


def test_the_file_system_of_this_test_is_known(tmp_path: Path) -> None:
    if not Path("/proc/self/mountinfo").exists():
        pytest.skip("needs /proc/self/mountinfo")
    mounted = {line.split(" - ")[1].split(" ")[0] for line in Path("/proc/self/mountinfo").read_text().splitlines()}
    assert filesystems.filesystem_type(tmp_path / "not" / "there") in mounted


@pytest.mark.parametrize(
    ("version", "mode"),
    [
        ((3, 40, 1), "delete"),
        ((3, 44, 5), "delete"),
        ((3, 44, 6), "wal"),
        ((3, 45, 0), "delete"),
        ((3, 50, 6), "delete"),
        ((3, 50, 7), "wal"),
        ((3, 51, 0), "delete"),
        ((3, 51, 2), "delete"),
        ((3, 51, 3), "wal"),
        ((3, 52, 0), "wal"),
    ],
)
def test_write_ahead_only_where_it_is_safe(version: tuple[int, int, int], mode: str) -> None:
    assert journal_mode(version) == mode


def test_an_unsafe_write_ahead_log_is_left(url: str, database: Path) -> None:
    if journal_mode(sqlite3.sqlite_version_info[:3]) == "wal":
        pytest.skip("this SQLite's write-ahead log is safe")
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("PRAGMA journal_mode=wal").fetchone() == ("wal",)
        connection.execute("SELECT * FROM runs").fetchall()
        with pytest.raises(CatalogError, match="write-ahead") as caught:
            open_catalog(url, repository=REPOSITORY, display_url="/ckpts", mode="w", create=False, busy_seconds=0.1)
        assert caught.value.transient
    _open(url)
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)


@pytest.mark.parametrize(
    "url",
    [
        *("nonsense", "sqlite", "postgresql", "postgresql+psycopg", "sqlite://", "sqlite:///:memory:"),
        *("sqlite:////x.sqlite?mode=ro", "sqlite:///file:x?uri=true", "sqlite:////x%00y.sqlite", "mysql://h:port/db"),
    ],
)
def test_urls_that_name_no_catalog(url: str) -> None:
    with pytest.raises(InvalidInput, match="sqlite"):
        _open(url, create=True)


def test_another_database_is_named_without_its_password() -> None:
    url = "mysql://alice:secret@db.example/ckpts"
    with pytest.raises(InvalidInput, match=r"mysql.*postgresql://") as caught:
        _open(url)
    assert "secret" not in str(caught.value)
    assert display(url) == "mysql://alice:***@db.example/ckpts"


@pytest.mark.parametrize("name", ["plain", "with space", "a%41", "é", "what?", "x#1", "a+b", "user@host:1"])
def test_any_path_has_a_url_that_leads_back(tmp_path: Path, name: str) -> None:
    path = tmp_path / name / "catalog.sqlite"
    url = sqlite_url(path)
    assert sqlite_path(url) == path == Path(make_url(url).database or "")
    assert display(url) == url == make_url(url).render_as_string()


def test_relative_urls_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert sqlite_path("sqlite:///catalog.sqlite") == tmp_path / "catalog.sqlite"


def test_a_read_only_folder(url: str, database: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    database.chmod(0o400)
    database.parent.chmod(0o500)
    try:
        assert _open(url, "r").runs() == []
        with pytest.raises(CatalogError, match="read-only"):
            _open(url).ensure_run("llama", "llama-1")
    finally:
        database.parent.chmod(0o700)
