"""s3fs against a real server that honours conditions, and against one that says it does."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fsspec_rig import s3_options
from s3_rig import RcloneServer, SeaweedServer

import ckptfmt
from ckptfmt.connect import backend_for
from ckptfmt.errors import BackendError, InvalidInput, NotFound, Unavailable
from ckptfmt.ports.backend import Backend
from ckptfmt.testing.backend_rig import pattern
from ckptfmt.testing.backends import BackendConformance


@pytest.fixture(scope="module")
def options(seaweed: SeaweedServer) -> dict[str, Any]:
    return s3_options(seaweed.endpoint)


@pytest.fixture(scope="module")
def raw(options: dict[str, Any]) -> Any:
    import s3fs

    return s3fs.S3FileSystem(**options, skip_instance_cache=True, use_listings_cache=False)


@pytest.fixture
def root(seaweed: SeaweedServer) -> str:
    """``bucket/prefix`` of a place of this test alone."""
    return seaweed.new_root()


class OnS3(BackendConformance):
    @pytest.fixture
    def backend(self, options: dict[str, Any], raw: Any, root: str) -> Backend:
        self.raw, self.start = raw, root
        return backend_for(f"fsspec+s3://{root}", options, create=True)

    def raw_read(self, backend: Backend, key: str) -> bytes:
        return self.raw.cat_file(f"{self.start}/{key}")  # type: ignore[no-any-return]

    def raw_write(self, backend: Backend, key: str, data: bytes) -> None:
        self.raw.pipe_file(f"{self.start}/{key}", data)

    def raw_delete(self, backend: Backend, key: str) -> None:
        self.raw.rm_file(f"{self.start}/{key}")

    def raw_list(self, backend: Backend) -> list[str]:
        start = f"{self.start}/"
        # s3fs lists an empty folder as an entry of its own.
        return [path.removeprefix(start) for path in self.raw.find(self.start) if path.startswith(start)]


@pytest.mark.slow
class TestS3fs(OnS3):
    def test_an_object_of_many_parts(self, place: Backend) -> None:
        data = pattern((32 << 20) + 12_345)
        self.put(place, "f/large", data)
        assert self.raw_read(place, "f/large") == data


@pytest.fixture
def backend(options: dict[str, Any], root: str) -> Backend:
    return backend_for(f"fsspec+s3://{root}", options, create=True)


@pytest.mark.slow
def test_an_error_in_mid_upload_publishes_nothing_and_leaves_no_upload(
    backend: Backend, raw: Any, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # FR-084, FR-086
    writer = backend.open_writer("x", 40 << 20)
    for at in range(0, 40 << 20, 8 << 20):
        writer.write_at(at, bytes(8 << 20))
    call, sent = type(raw)._call_s3, []

    async def cut(self: Any, method: str, *args: Any, **named: Any) -> Any:
        if method == "upload_part" and named["PartNumber"] == 2:
            sent.append(method)
            raise ConnectionResetError("cut")
        return await call(self, method, *args, **named)

    monkeypatch.setattr(type(raw), "_call_s3", cut)
    with pytest.raises(Unavailable, match="x"):
        writer.finish()
    monkeypatch.undo()
    assert len(sent) > 1  # it was tried again before it was given up
    writer.abort()
    with pytest.raises(NotFound):
        backend.head("x")
    bucket, _, prefix = root.partition("/")
    assert [each for each in raw.list_multipart_uploads(bucket) if each["Key"].startswith(prefix)] == []


def test_a_dropped_writer_publishes_nothing(backend: Backend) -> None:
    writer = backend.open_writer("x", 10)
    writer.write_at(0, bytes(10))
    del writer
    gc.collect()
    assert backend.list("") == []


def test_a_wrong_secret_is_named_as_such(options: dict[str, Any], root: str) -> None:
    with pytest.raises(ckptfmt.AccessDenied, match="credentials"):
        backend_for(f"fsspec+s3://{root}", {**options, "secret": "wrong"}, create=True)


@pytest.mark.slow
def test_save_and_load_by_proof(options: dict[str, Any], root: str, tmp_path: Path) -> None:
    url = f"fsspec+s3://{root}"
    state = {"w": np.arange(3_000_000, dtype=np.float32), "step": 7}
    catalog = f"sqlite:///{tmp_path}/catalog.sqlite"
    saved = ckptfmt.save(state, url, run="llama", step=7, catalog=catalog, storage_options=options)
    assert saved.verify().ok
    loaded = ckptfmt.load(f"{url}#llama", storage_options=options)
    assert loaded["step"] == 7
    assert np.array_equal(loaded["w"], state["w"])


# -- a server that overwrites although it was asked not to ------------------------------------------
@pytest.fixture
def liar(rclone: RcloneServer) -> tuple[str, dict[str, Any]]:
    options = s3_options(rclone.endpoint)
    # It sends the whole object's checksum with a range of it.
    options["config_kwargs"]["response_checksum_validation"] = "when_required"
    return f"fsspec+s3://{rclone.new_root()}", options


def test_a_server_that_ignores_conditions_is_not_written_to(liar: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    url, options = liar
    with pytest.raises(InvalidInput, match=r"single_writer.*Reading works") as caught:
        backend_for(url, options, create=True)
    assert caught.value.kind == "no_conditional_create"
    assert backend_for(url, options).list("") == []  # the probe went away again


@pytest.mark.slow
def test_a_user_who_vouches_for_being_alone_may_write_there(
    liar: tuple[str, dict[str, Any]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url, options = liar
    catalog = f"sqlite:///{tmp_path}/catalog.sqlite"
    with caplog.at_level(logging.WARNING):
        ckptfmt.save({"w": np.arange(1000)}, url, catalog=catalog, storage_options={**options, "single_writer": True})
    assert "can overwrite commit records" in caplog.text
    assert np.array_equal(ckptfmt.load(url, storage_options=options)["w"], np.arange(1000))


def test_what_comes_back_wrong_is_not_taken_for_stored(
    backend: Backend, raw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # FR-085: right length, other bytes
    call = type(raw)._call_s3

    async def damaged(self: Any, method: str, *args: Any, **named: Any) -> Any:
        if method == "put_object":
            named["Body"] = bytes(len(named["Body"]))
        return await call(self, method, *args, **named)

    writer = backend.open_writer("x", 100_000)
    writer.write_at(0, pattern(100_000))
    monkeypatch.setattr(type(raw), "_call_s3", damaged)
    with pytest.raises(BackendError, match="differs") as caught:
        writer.finish()
    assert caught.value.kind == "read_back"
    monkeypatch.undo()
    with pytest.raises(NotFound):
        backend.head("x")
