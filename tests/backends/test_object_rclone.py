"""A server that takes conditions and checksums and heeds neither: it is read from, and written to only knowingly."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from s3_rig import RcloneServer

from ckptfmt.backends.object import ObjectBackend
from ckptfmt.backends.object_probe import forget
from ckptfmt.backends.s3 import s3_backend
from ckptfmt.errors import Conflict, Corrupt, InvalidInput, NotFound
from ckptfmt.testing.backend_rig import pattern


@pytest.fixture
def root(rclone: RcloneServer) -> str:
    return f"s3://{rclone.new_root()}"


@pytest.fixture
def backend(rclone: RcloneServer, root: str) -> Iterator[ObjectBackend]:
    backend = s3_backend(root, rclone.options())
    yield backend
    forget(backend.url)
    backend.close()


@pytest.fixture
def knowing(rclone: RcloneServer, root: str) -> Iterator[ObjectBackend]:
    backend = s3_backend(root, rclone.options(single_writer=True, part_bytes=5 << 20))
    yield backend
    forget(backend.url)
    backend.close()


def test_it_is_not_written_to(backend: ObjectBackend) -> None:
    with pytest.raises(InvalidInput, match="single_writer") as caught:
        backend.create_root()
    assert caught.value.kind == "no_conditional_create"
    with pytest.raises(InvalidInput):
        backend.create("x", b"1")
    assert backend.list("") == []


def test_it_is_read_from(backend: ObjectBackend, rclone: RcloneServer, root: str) -> None:
    data = pattern(3_000_000)
    rclone.client(rclone.bucket).call("PUT", f"{root.rpartition('/')[2]}/a/x", body=data)
    assert backend.read("a/x", limit=3_000_000) == data
    for offset, nbytes in ((0, 100), (1_000_000, 2_000_000), (2_999_999, 1)):
        buffer = bytearray(nbytes)
        backend.read_into("a/x", offset, memoryview(buffer))
        assert buffer == data[offset : offset + nbytes]
    for offset, nbytes in ((2_999_999, 2), (3_000_000, 1), (4_000_000, 10)):
        with pytest.raises(Corrupt):
            backend.read_into("a/x", offset, memoryview(bytearray(nbytes)))
    assert backend.head("a/x").nbytes == 3_000_000
    assert [info.key for info in backend.list("")] == ["a/x"]
    assert backend.list_folders("") == ["a"]
    with pytest.raises(NotFound):
        backend.head("a/y")


def test_one_who_knows_writes_to_it(knowing: ObjectBackend) -> None:
    knowing.create_root()
    knowing.create("a/x", b"1")
    knowing.create("a/x", b"1")
    with pytest.raises(Conflict):
        knowing.create("a/x", b"2")
    data = pattern((10 << 20) + 1)
    writer = knowing.open_writer("a/pack", len(data))
    writer.write_at(0, data)
    writer.finish()
    assert knowing.read("a/pack", limit=len(data)) == data
    with pytest.raises(Conflict):
        knowing.open_writer("a/pack", 1)
    knowing.delete("a/pack")
    assert [info.key for info in knowing.list("")] == ["a/x"]
    assert knowing.sweep_debris("", dry_run=True) == []
