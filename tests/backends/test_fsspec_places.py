"""What users meet on fsspec file systems: refusals, caches, lost connections, forks and the spool."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forked import Forked
from fsspec.implementations.dirfs import DirFileSystem
from fsspec_rig import PASSWORD, PlainFiles, SftpServer, StreamStore, sftp_server, wheel_module

import ckptfmt
from ckptfmt.backends.fsspec_backend import FsspecBackend, FsspecOptions
from ckptfmt.backends.fsspec_opening import unwrapped
from ckptfmt.connect import backend_for
from ckptfmt.errors import AccessDenied, Conflict, InvalidInput, NotFound, OutOfSpace, Unavailable

ALONE = FsspecOptions(single_writer=True)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SftpServer]:
    with sftp_server(tmp_path_factory.mktemp("sftp")) as server:
        yield server


# -- URLs and options --------------------------------------------------------------------------------
def test_a_scheme_that_nobody_knows() -> None:
    with pytest.raises(InvalidInput, match="'nosuch'"):
        backend_for("nosuch://x/y")


def test_our_own_memory_stays_and_that_of_fsspec_is_asked_for() -> None:
    assert not isinstance(backend_for("memory://ours"), FsspecBackend)
    assert isinstance(backend_for("fsspec+memory://theirs"), FsspecBackend)


def test_a_library_that_is_not_installed_is_named() -> None:
    with pytest.raises(InvalidInput, match=r"not installed.*pip"):
        backend_for("dropbox://x/y")


def test_an_option_that_the_file_system_does_not_take(server: SftpServer) -> None:
    with pytest.raises(InvalidInput, match="nonsense"):
        backend_for("ssh://127.0.0.1/x", {**server.options, "nonsense": 1})


def test_an_option_of_ours_is_checked() -> None:
    with pytest.raises(InvalidInput, match="single_writer"):
        backend_for("fsspec+memory://x", {"single_writer": "yes"})


def test_a_url_with_a_query_is_no_root() -> None:
    with pytest.raises(InvalidInput, match="headers") as caught:
        backend_for("https://example.invalid/root?token=abc")
    assert "abc" not in str(caught.value)


def test_no_password_in_url_or_messages(server: SftpServer) -> None:
    url = f"ssh://trainer:{PASSWORD}@127.0.0.1:{server.port}/absent"
    backend = backend_for(url)
    assert PASSWORD not in backend.url
    assert "trainer@127.0.0.1" in backend.url
    with pytest.raises(NotFound) as caught:
        backend.read("x", limit=1)
    assert PASSWORD not in str(caught.value)


def test_opening_to_read_connects_to_nothing_that_writes(tmp_path: Path) -> None:
    backend_for(f"fsspec+file://{tmp_path}/absent")
    assert not (tmp_path / "absent").exists()
    with pytest.raises(NotFound, match="absent"):
        ckptfmt.open(f"fsspec+file://{tmp_path}/absent", mode="r")


def test_writing_wants_a_catalog_that_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no embedded catalog"):
        ckptfmt.open(f"fsspec+file://{tmp_path}/root")


def test_import_of_the_library_loads_no_fsspec() -> None:
    code = "import sys, ckptfmt, ckptfmt.connect; sys.exit('fsspec' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


# -- may it be written to ----------------------------------------------------------------------------
def test_an_unknown_file_system_is_not_written_to(tmp_path: Path) -> None:
    backend = FsspecBackend(PlainFiles(skip_instance_cache=True), str(tmp_path), "plain://x")
    with pytest.raises(InvalidInput, match=r"two launches.*single_writer") as caught:
        backend.create_root()
    assert caught.value.kind == "no_conditional_create"
    with pytest.raises(InvalidInput):
        backend.create("x", b"1")
    with pytest.raises(InvalidInput):
        backend.open_writer("x", 1)
    assert list(tmp_path.iterdir()) == []


def test_it_is_written_to_by_who_vouches_for_being_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    backend = FsspecBackend(PlainFiles(skip_instance_cache=True), str(tmp_path), "plain://x", ALONE)
    with caplog.at_level(logging.WARNING):
        backend.create_root()
    assert "can overwrite commit records" in caplog.text
    backend.create("x", b"1")
    with pytest.raises(Conflict):
        backend.create("x", b"2")
    assert (tmp_path / "x").read_bytes() == b"1"


@pytest.mark.parametrize("library", ["sshfs", "paramiko"])
def test_an_sftp_server_without_hard_links_is_not_written_to(
    library: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "served"
    folder.mkdir()
    with sftp_server(folder, extensions=False) as server, by_sftp(library, server, FsspecOptions()) as backend:
        with pytest.raises(InvalidInput, match="single_writer"):
            backend.create_root()
        assert "cannot sync" in caplog.text
        assert list((folder / "root").iterdir()) == []
        with by_sftp(library, server, ALONE) as alone:
            alone.create_root()
            alone.create("x", b"1")
            assert (folder / "root" / "x").read_bytes() == b"1"


@pytest.mark.parametrize("library", ["sshfs", "paramiko"])
def test_an_sftp_server_syncs_before_the_object_has_its_name(library: str, tmp_path: Path) -> None:
    with sftp_server(tmp_path) as server, by_sftp(library, server, FsspecOptions()) as backend:
        backend.create_root()
        before = len(server.synced)
        backend.create("x", b"1")
        assert len(server.synced) == before + 1


@contextlib.contextmanager
def by_sftp(library: str, server: SftpServer, options: FsspecOptions) -> Iterator[FsspecBackend]:
    if library == "sshfs":
        fs = wheel_module("sshfs").SSHFileSystem(**server.options, skip_instance_cache=True)
    else:
        sftp = wheel_module("fsspec.implementations.sftp")
        fs = sftp.SFTPFileSystem(**server.options, skip_instance_cache=True)
    yield FsspecBackend(fs, "/root", "sftp://127.0.0.1/root", options)
    if library == "paramiko":
        fs.client.close()


def test_what_a_place_is_worth_is_told_at_open(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        backend_for(f"fsspec+file://{tmp_path}/root", create=True)
    assert "never synced" in caplog.text


# -- caches (FR-088) ---------------------------------------------------------------------------------
class CachingStore(StreamStore):
    """Remembers listings by default, as s3fs, gcsfs and others do."""

    protocol = "caching"

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[dict[str, Any]]:
        if path in self.dircache:
            return self.dircache[path]  # type: ignore[no-any-return]
        self.dircache[path] = found = super().ls(path, detail)
        return found

    def invalidate_cache(self, path: str | None = None) -> None:
        """A no-op, as in some libraries."""


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "through DirFileSystem"])
def test_what_others_write_is_seen_at_once(wrapped: bool, tmp_path: Path) -> None:
    fs = CachingStore(world=tmp_path.name, skip_instance_cache=True)
    objects = fs.objects
    objects["bucket/root/runs/a/x"] = b"1"
    assert len(fs.ls("bucket/root/runs/a")) == 1
    objects["bucket/root/runs/a/y"] = b"1"
    assert len(fs.ls("bucket/root/runs/a")) == 1  # the rig remembers
    inner = DirFileSystem("bucket", CachingStore(world=tmp_path.name)) if wrapped else CachingStore(tmp_path.name)
    backend = FsspecBackend(*unwrapped(inner, "root" if wrapped else "bucket/root"), "caching://bucket/root")
    for later in ("y", "z"):
        objects[f"bucket/root/runs/a/{later}"] = b"1"
        assert backend.list("runs/a")[-1].key == f"runs/a/{later}"
    objects["bucket/root/runs/b/z"] = b"1"
    assert backend.list_folders("runs") == ["a", "b"]


# -- connections ---------------------------------------------------------------------------------------
def test_a_connection_that_was_lost_is_made_again(tmp_path: Path) -> None:
    with sftp_server(tmp_path) as server:
        backend = backend_for("ssh://127.0.0.1/root", server.options, create=True)
        backend.create("x", b"1")
        server.cut()
        for _ in range(3):  # what was under way fails, the next call connects
            try:
                found = backend.read("x", limit=1)
                break
            except Unavailable:
                continue
        assert found == b"1"


def test_a_server_that_is_not_there_is_unavailable(tmp_path: Path) -> None:
    with sftp_server(tmp_path) as server:
        options = server.options
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1"):
        backend_for("ssh://127.0.0.1/root", options)


def test_a_wrong_password_is_denied(server: SftpServer) -> None:
    with pytest.raises(AccessDenied, match="credentials"):
        backend_for("ssh://127.0.0.1/root", {**server.options, "password": "wrong"})


def test_a_forked_child_reads_and_writes(server: SftpServer, tmp_path: Path) -> None:
    # FR-120
    backend = backend_for(f"ssh://127.0.0.1/{tmp_path.name}", server.options, create=True)
    backend.create("x", b"1")
    Forked(lambda: backend.create("y", backend.read("x", limit=1))).result()
    assert backend.read("y", limit=1) == b"1"


# -- the spool -----------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_large_object_takes_no_memory_and_no_name(tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    spool.mkdir()
    backend = backend_for(f"fsspec+file://{tmp_path}/root", {"spool": str(spool)}, create=True)
    nbytes, piece = 128 << 20, bytes(8 << 20)
    tracemalloc.start()
    try:
        writer = backend.open_writer("x", nbytes)
        for at in range(0, nbytes, len(piece)):
            writer.write_at(at, piece)
        assert list(spool.iterdir()) == []
        writer.finish()
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
    assert backend.head("x").nbytes == nbytes


def test_a_spool_without_room_is_named(tmp_path: Path) -> None:
    backend = backend_for(f"fsspec+file://{tmp_path}/root", {"spool": str(tmp_path)}, create=True)
    with pytest.raises(OutOfSpace, match="spool") as caught:
        backend.open_writer("x", 1 << 43)
    assert caught.value.needed == 1 << 43
    assert caught.value.free is not None


def test_a_spool_that_is_absent_is_named(tmp_path: Path) -> None:
    backend = backend_for(f"fsspec+file://{tmp_path}/root", {"spool": f"{tmp_path}/absent"}, create=True)
    with pytest.raises(NotFound, match="absent"):
        backend.open_writer("x", 1)


def test_debris_of_a_killed_create_is_found_and_swept(tmp_path: Path) -> None:
    backend = backend_for(f"fsspec+file://{tmp_path}/root", create=True)
    backend.make_folder("a/b")
    (tmp_path / "root/a/b/.ckptfmt-tmp-1-abc").write_bytes(b"12")
    assert backend.list("") == []
    assert [info.nbytes for info in backend.sweep_debris("a", dry_run=True)] == [2]
    assert backend.sweep_debris("a", dry_run=True, deep=False) == []
    backend.sweep_debris("", dry_run=False)
    assert list((tmp_path / "root/a/b").iterdir()) == []
