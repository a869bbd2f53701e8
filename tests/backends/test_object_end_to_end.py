"""A whole life on an S3 server: saved, restored, thinned out, verified, and read where there is no catalog."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked import Forked
from s3_rig import KEY, SECRET, SeaweedServer

import ckptfmt
from ckptfmt.backends import object_probe
from ckptfmt.backends.object_gathering import Gathering
from ckptfmt.backends.object_store import Part
from ckptfmt.backends.s3 import s3_backend
from ckptfmt.backends.s3_store import S3Store
from ckptfmt.engine.save import persist
from ckptfmt.errors import InvalidInput

_STATE = {"weights": np.arange(3_000_000, dtype=np.float64), "small": np.ones(3, dtype=np.int8), "epoch": 4}


@pytest.fixture
def url(seaweed: SeaweedServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """As users give it: the place in the URL, the keys in the environment."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    return f"s3://{seaweed.new_root()}/team/ckpts?endpoint={seaweed.endpoint}"


@pytest.fixture
def catalog(tmp_path: Path, empty_catalog: Path, quick: None) -> str:
    path = tmp_path / "catalog.sqlite"
    path.write_bytes(empty_catalog.read_bytes())
    return f"sqlite:///{path}"


def _equal(found: Any) -> bool:
    return (
        np.array_equal(found["weights"], _STATE["weights"])
        and np.array_equal(found["small"], _STATE["small"])
        and found["epoch"] == 4
    )


@pytest.mark.slow
def test_saved_restored_thinned_verified_and_read_by_proof(url: str, catalog: str) -> None:
    with ckptfmt.open(url, catalog=catalog) as repository:
        with repository.checkpointer("llama", every_steps=1) as checkpointer:
            for step in range(3):
                pending = checkpointer.save(_STATE, step=step)
                assert pending is not None
                pending.result()
        assert [info.step for info in repository.generations(run="llama")] == [2, 1, 0]
        latest = repository.latest("llama")
        assert latest.verify().ok
        into = {"weights": np.zeros(3_000_000), "small": np.zeros(3, dtype=np.int8), "epoch": 0}
        latest.restore(into)
        assert _equal(into)
        assert _equal(latest.load())
        assert np.array_equal(latest["weights"][10:20], _STATE["weights"][10:20])
        repository.gc(dry_run=False)
    with ckptfmt.open(url, catalog=catalog) as again:  # the same place is known again
        assert again.latest("llama").step == 2
    assert _equal(ckptfmt.load(f"{url}#llama"))
    assert _equal(ckptfmt.load(f"{url}#llama@step:1", catalog="none"))
    assert ckptfmt.load(url, run="llama", keys="small")["small"].sum() == 3


def test_a_stage_on_a_local_disk_is_copied_to_the_store(url: str, catalog: str, tmp_path: Path) -> None:
    repository = ckptfmt.open(url, catalog=catalog, stage=tmp_path / "stage")
    with repository, repository.checkpointer("llama") as checkpointer:
        pending = checkpointer.save(_STATE, step=1)
        assert pending is not None
        assert _equal(pending.result().load())
    assert _equal(ckptfmt.load(f"{url}#llama"))


@pytest.mark.parametrize(("part_mib", "threads", "sent_mib"), [(8, 16, 8), (16, 16, 16), (8, 1, 16)])
def test_parts_are_sent_from_where_the_snapshot_lies(
    url: str, catalog: str, part_mib: int, threads: int, sent_mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None is put together from pieces, whatever the sizes of the tensors; few threads send larger ones."""
    monkeypatch.setattr(persist, "distant_thread_count", lambda: threads)
    monkeypatch.setattr(persist, "_WRITES_EACH", 1)
    monkeypatch.setattr(persist, "_WRITE_BYTES", 16 << 20)
    numbers: list[int] = []
    sent: list[int] = []
    put_part = S3Store.put_part

    def watched(store: S3Store, key: str, upload: str, number: int, data: tuple[memoryview, ...], crc: int) -> Part:
        assert len(data) == 1
        sent.append(len(data[0]))
        numbers.append(number)
        return put_part(store, key, upload, number, data, crc)

    def gathered(*args: object) -> None:
        raise AssertionError("a part came in pieces")

    monkeypatch.setattr(S3Store, "put_part", watched)
    monkeypatch.setattr(Gathering, "added", gathered)
    state = {f"t{i}": np.arange(1_300_000 + 777 * i, dtype=np.float32) for i in range(5)}
    ckptfmt.save(state, url, catalog=catalog, storage_options={"part_bytes": part_mib << 20})
    whole = sum(map(len, state.values())) * 4 // (sent_mib << 20)
    assert sent.count(sent_mib << 20) == whole == 24 // sent_mib  # beside the last, and a probe's
    assert set(numbers) == set(range(1, whole + 2))


@pytest.mark.parametrize("writes_each", [1, 4])
def test_requests_of_a_load_end_where_parts_do(
    url: str, catalog: str, writes_each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A range that reaches into two parts costs the store two reads."""
    monkeypatch.setattr(persist, "distant_thread_count", lambda: 1)
    monkeypatch.setattr(persist, "_WRITES_EACH", writes_each)
    parts: dict[str, dict[int, int]] = {}
    ranges: list[tuple[str, int, int]] = []
    put_part, get_into = S3Store.put_part, S3Store.get_into

    def put(store: S3Store, key: str, upload: str, number: int, data: tuple[memoryview, ...], crc: int) -> Part:
        parts.setdefault(key, {})[number] = sum(map(len, data))
        return put_part(store, key, upload, number, data, crc)

    def get(store: S3Store, key: str, offset: int, view: memoryview) -> int:
        ranges.append((key, offset, offset + len(view)))
        return get_into(store, key, offset, view)

    monkeypatch.setattr(S3Store, "put_part", put)
    monkeypatch.setattr(S3Store, "get_into", get)
    state = {f"t{i}": np.arange(3_300_000 + 777 * i, dtype=np.float32) for i in range(5)}
    ckptfmt.save(state, url, run="llama", catalog=catalog)
    loaded = ckptfmt.load(f"{url}#llama")
    assert all(np.array_equal(loaded[name], value) for name, value in state.items())
    (key,) = {key for key, *_ in ranges}
    length = parts[key][1]
    assert length == {1: 32 << 20, 4: 8 << 20}[writes_each]
    assert len(ranges) >= 8
    for _, start, stop in ranges:
        assert start // length == (stop - 1) // length


def test_writing_wants_a_catalog_by_name(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CKPTFMT_CATALOG", raising=False)
    with pytest.raises(InvalidInput, match="sqlite:////local"):
        ckptfmt.save(_STATE, url)


def test_a_fork_uses_connections_of_its_own(url: str, catalog: str) -> None:
    ckptfmt.save(_STATE, url, catalog=catalog)
    with ckptfmt.open(url, mode="r") as repository:
        generation = repository.latest()
        assert list(generation) == ["weights", "small"]
        fork = Forked(lambda: _equal(generation.load()))
        assert _equal(generation.load())
        assert fork.result() is True


def test_a_fork_does_not_wait_for_its_parents_threads(url: str, catalog: str) -> None:
    """Made while other threads of the parent open connections, fetch keys and ask the server."""
    ckptfmt.save(_STATE, url, catalog=catalog)
    place = s3_backend(url)
    store = place._place.store
    assert isinstance(store, S3Store)
    client = store._client
    assert client._credentials is not None

    def create() -> None:
        signal.alarm(20)
        place.create("from-a-fork", b"1")

    with client._http._lock, client._credentials._lock, object_probe._lock:
        fork = Forked(create)
        assert fork.result() is None
    assert place.read("from-a-fork", limit=1) == b"1"
    place.close()


_READER = """
import sys, ckptfmt
for name in ("numpy", "torch", "sqlalchemy", "obstore", "ssl", "xml.etree.ElementTree"):
    assert name not in sys.modules, name
state = ckptfmt.load(sys.argv[1])
assert "sqlalchemy" not in sys.modules and "obstore" not in sys.modules
print(float(state["weights"][-1]))
"""


def test_a_reader_needs_neither_sql_nor_obstore(url: str, catalog: str) -> None:
    ckptfmt.save(_STATE, url, catalog=catalog)
    done = subprocess.run(
        [sys.executable, "-c", _READER, f"{url}#default"], capture_output=True, text=True, env=os.environ, timeout=60
    )
    assert done.stdout.strip() == "2999999.0", done.stderr


@pytest.fixture(autouse=True)
def _no_other_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
