"""The object backend passes the shipped conformance suite: on S3, and on the driver of gs:// and az://."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from obstore.store import MemoryStore
from obstore.store import S3Store as ObstoreS3
from s3_rig import KEY, SECRET, SeaweedServer

from ckptfmt.backends import object_spool
from ckptfmt.backends.object import ObjectBackend
from ckptfmt.backends.object_probe import forget
from ckptfmt.backends.object_publishing import Place
from ckptfmt.backends.object_retry import Patience
from ckptfmt.backends.obstore_store import NO_RETRIES, ObstoreStore
from ckptfmt.backends.s3 import s3_backend
from ckptfmt.backends.s3_options import parse_place
from ckptfmt.backends.s3_store import S3Store
from ckptfmt.errors import Conflict, OutOfSpace
from ckptfmt.ports.backend import Backend
from ckptfmt.testing.backend_rig import pattern
from ckptfmt.testing.backends import BackendConformance


class TestS3(BackendConformance):
    races, crowd = 2, 4  # SeaweedFS lets creates of one key take turns by a lock that it asks for once a second

    @pytest.fixture
    def backend(self, seaweed: SeaweedServer) -> Iterator[ObjectBackend]:
        bucket, _, root = seaweed.new_root().partition("/")
        self._raw = S3Store(parse_place(f"s3://{bucket}", seaweed.options()))
        self._root = f"{root}/a root/"
        backend = s3_backend(f"s3://{bucket}/{self._root}", seaweed.options())
        backend.create_root()
        yield backend
        forget(backend.url)
        backend.close()

    def raw_read(self, backend: Backend, key: str) -> bytes:
        return self._raw.get(self._root + key, 1 << 30)[0]

    def raw_write(self, backend: Backend, key: str, data: bytes) -> None:
        self._raw.put(self._root + key, memoryview(data), absent=False)

    def raw_delete(self, backend: Backend, key: str) -> None:
        self._raw.delete(self._root + key)

    def raw_list(self, backend: Backend) -> list[str]:
        stored: list[Any] = [*self._raw.list(self._root), *self._raw.uploads(self._root)]
        return [each.key.removeprefix(self._root) for each in stored]


class TestObstore(BackendConformance):
    """The driver of Google's and Azure's stores, on a store in memory and on the S3 server."""

    races, crowd = 2, 4

    @pytest.fixture(params=["memory", "server"])
    def backend(self, request: pytest.FixtureRequest, seaweed: SeaweedServer) -> Iterator[ObjectBackend]:
        bucket, _, root = seaweed.new_root().partition("/")
        self._root = f"{root}/"
        if request.param == "memory":
            memory = MemoryStore()
            self._raw = ObstoreStore(lambda: memory)
        else:
            keys = {"access_key_id": KEY, "secret_access_key": SECRET, "region": "us-east-1"}
            self._raw = ObstoreStore(
                lambda: ObstoreS3(
                    bucket,
                    endpoint=seaweed.endpoint,
                    client_options={"allow_http": True},
                    retry_config=NO_RETRIES,
                    **keys,
                )
            )
        url = f"gs://bucket/{self._root}"
        place = Place(self._raw, url, url.rstrip("/"), self._root, Patience(), False, 0.0)
        yield ObjectBackend(place, "gs", multipart=None)
        forget(url)

    def raw_read(self, backend: Backend, key: str) -> bytes:
        return self._raw.get(self._root + key, 1 << 30)[0]

    def raw_write(self, backend: Backend, key: str, data: bytes) -> None:
        self._raw.put(self._root + key, memoryview(data), absent=False)

    def raw_delete(self, backend: Backend, key: str) -> None:
        self._raw.delete(self._root + key)

    def raw_list(self, backend: Backend) -> list[str]:
        return [each.key.removeprefix(self._root) for each in self._raw.list(self._root)]

    def test_a_large_object_passes_through_a_file(self, place: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(object_spool, "_ONE_PUT_MAX", 8 << 20)
        data = pattern((16 << 20) + 5)  # of two parts
        writer = place.open_writer("f/x", len(data))
        for at in reversed(range(0, len(data), 8 << 20)):
            writer.write_at(at, data[at : at + (8 << 20)])
        writer.finish()
        assert self.raw_read(place, "f/x") == data
        with pytest.raises(Conflict):
            place.open_writer("f/x", 1)

    def test_no_room_for_the_file_is_said(self, place: Backend) -> None:
        with pytest.raises(OutOfSpace, match="TMPDIR"):
            place.open_writer("f/x", 4 << 40)
        assert self.raw_list(place) == []
