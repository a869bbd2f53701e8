"""Files that publish themselves when they are closed or collected (FR-084), and whole repositories on fsspec."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec_rig import SftpServer, StreamStore, sftp_server

import ckptfmt
from ckptfmt.backends.fsspec_backend import FsspecBackend, FsspecOptions
from ckptfmt.errors import NotFound, Unavailable

ALONE = FsspecOptions(single_writer=True)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SftpServer]:
    with sftp_server(tmp_path_factory.mktemp("sftp")) as server:
        yield server


def stream_store() -> tuple[StreamStore, FsspecBackend]:
    fs = StreamStore(skip_instance_cache=True)
    backend = FsspecBackend(fs, "bucket/root", "stream://bucket/root", ALONE)
    backend.create_root()
    assert fs.objects == {}
    return fs, backend


@pytest.mark.slow
def test_the_rig_publishes_what_is_dropped() -> None:
    fs = StreamStore(skip_instance_cache=True)
    file = fs.open("bucket/x", "wb")
    file.write(b"half")
    del file
    gc.collect()
    assert fs.objects == {"bucket/x": b"half"}


def test_an_error_in_the_middle_publishes_nothing() -> None:
    fs, backend = stream_store()
    writer = backend.open_writer("x", 20 << 20)
    for at in range(0, 20 << 20, 5 << 20):
        writer.write_at(at, bytes(5 << 20))
    fs.blocks_fail_from = 1
    with pytest.raises(Unavailable, match="x"):
        writer.finish()
    writer.abort()
    del writer
    gc.collect()
    assert fs.objects == {}
    with pytest.raises(NotFound):
        backend.head("x")


def test_leaving_in_the_middle_publishes_nothing() -> None:
    fs, backend = stream_store()

    def training() -> None:
        writer = backend.open_writer("x", 1000)
        writer.write_at(0, bytes(500))
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError):
        training()
    gc.collect()
    assert fs.objects == {}


def test_a_stream_without_seek_tell_fileno_and_rename_does_for_a_repository(tmp_path: Path) -> None:
    # FR-095
    fsspec.register_implementation("stream", StreamStore, clobber=True)
    options = {"world": tmp_path.name, "single_writer": True}
    _saves_and_loads("stream://bucket/root", tmp_path, options)
    assert any(name.endswith("COMMIT.json") for name in StreamStore.worlds.pop(tmp_path.name))


def _saves_and_loads(url: str, tmp_path: Path, options: dict[str, Any]) -> None:
    """Two saves, all ways of reading, and gc of the older."""
    catalog = f"sqlite:///{tmp_path}/catalog.sqlite"
    state = {"w": np.arange(1_500_000, dtype=np.float32), "b": np.ones(3), "step": 1}
    for step in (1, 2):
        ckptfmt.save({**state, "step": step}, url, run="llama", step=step, catalog=catalog, storage_options=options)
    reading = {name: value for name, value in options.items() if name != "single_writer"}
    for place, named in (
        (url, {"run": "llama", "catalog": catalog}),
        (f"{url}#llama", {}),
        (f"{url}#llama@step:2", {}),
    ):
        loaded = ckptfmt.load(place, storage_options=reading, **named)
        assert loaded["step"] == 2
        assert np.array_equal(loaded["w"], state["w"])
    into = {"w": np.zeros(1_500_000, dtype=np.float32), "b": np.zeros(3), "step": 0}
    ckptfmt.restore(into, f"{url}#llama", storage_options=reading)
    assert np.array_equal(into["w"], state["w"])
    with ckptfmt.open(url, catalog=catalog, storage_options=options) as repository:
        assert repository.generation(1).verify().ok
        assert [info.step for info in repository.generations()] == [2, 1]
        repository.recover()
        repository.gc(dry_run=False)


@pytest.mark.parametrize("scheme", ["fsspec+memory", "fsspec+file", "ssh"])
def test_a_repository_from_save_to_gc(scheme: str, tmp_path: Path, server: SftpServer) -> None:
    if scheme == "ssh":
        _saves_and_loads(f"ssh://127.0.0.1/{tmp_path.name}", tmp_path, server.options)
    elif scheme == "fsspec+file":
        _saves_and_loads(f"fsspec+file://{tmp_path}/root", tmp_path, {})
    else:
        _saves_and_loads(f"fsspec+memory://{tmp_path.name}", tmp_path, {})
