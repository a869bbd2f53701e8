"""What users of object stores met elsewhere does not happen here.

| case | what users met | tests |
| --- | --- | --- |
| FR-084 | an exception or the garbage collector publishes a truncated object | test_an_error_in_the_middle_publishes_nothing, test_a_dropped_writer_publishes_nothing_and_its_upload_is_swept |
| FR-085 | an object without some of its parts, of the right length | test_a_completion_without_one_of_its_parts_is_found, test_wrong_bytes_of_the_right_length_are_found_where_the_server_compares_nothing |
| FR-086 | uploads that failed cost storage unseen | test_the_upload_of_a_killed_process_is_swept, test_abandoned_uploads_are_swept_by_gc |
| FR-087 | a copy that says it succeeded | test_a_life_copies_nothing_and_writes_no_key_twice |
| FR-088 | a listing that is remembered | test_what_others_write_is_seen_at_once |
| FR-090 | all ranks are told to slow down; absurd retry settings | test_many_writers_get_through_a_storm, test_bad_settings_are_refused_before_anything_is_sent |
| FR-091 | keys expire in the middle of an upload | test_keys_that_expire_in_an_upload_are_renewed_once, test_keys_that_stay_expired_are_access_denied |
| FR-092 | one object is written at every save, and refused | test_a_life_copies_nothing_and_writes_no_key_twice |
| FR-093 | a lost answer makes a writer take its own object for another's | test_a_create_whose_answer_is_lost_succeeds_once, test_a_completion_whose_answer_is_lost_succeeds_once |
| FR-095 | saving asks a remote stream for fsync or fileno | test_saved_restored_thinned_verified_and_read_by_proof |
"""  # noqa: E501

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from field_cases import assert_every_case_has_tests
from s3_gate import S3Gate, s3_gate
from s3_rig import KEY, SECRET, SeaweedServer

import ckptfmt
from ckptfmt.backends.object_probe import forget
from ckptfmt.backends.s3 import s3_backend

_OPTIONS = {"key": KEY, "secret": SECRET, "part_bytes": 5 << 20, "upload_grace": 0}
_STATE = {"w": np.arange(2_000_000, dtype=np.float64), "epoch": 4}


def test_every_case_has_its_tests() -> None:
    assert_every_case_has_tests(__doc__, [84, 85, 86, 87, 88, 90, 91, 92, 93, 95])


@pytest.fixture
def gate(seaweed: SeaweedServer) -> Iterator[S3Gate]:
    with s3_gate(seaweed.port) as gate:
        yield gate


@pytest.fixture
def url(gate: S3Gate, seaweed: SeaweedServer) -> Iterator[str]:
    url = f"s3://{seaweed.new_root()}?endpoint={gate.endpoint}"
    yield url
    forget(url)


@pytest.fixture
def catalog(tmp_path: Path, empty_catalog: Path, quick: None) -> str:
    path = tmp_path / "catalog.sqlite"
    path.write_bytes(empty_catalog.read_bytes())
    return f"sqlite:///{path}"


@pytest.mark.slow
def test_a_life_copies_nothing_and_writes_no_key_twice(gate: S3Gate, url: str, catalog: str) -> None:
    with ckptfmt.open(url, catalog=catalog, storage_options=_OPTIONS) as repository:
        with repository.checkpointer(every_steps=1) as checkpointer:
            for step in range(5):
                checkpointer.save(_STATE, step=step)
        repository.latest().verify()
        repository.gc(dry_run=False)
    assert not any("x-amz-copy-source" in request.headers for request in gate.seen)
    published = Counter(
        request.path.partition("?")[0] for request in gate.seen if request.is_put or request.is_complete
    )
    twice = {path for path, times in published.items() if times > 1}
    assert all("/.ckptfmt-tmp-" in path for path in twice)  # what asks the server how it treats a taken name
    assert sum("COMMIT" in path for path in published) == 5


def test_what_others_write_is_seen_at_once(url: str, catalog: str) -> None:
    with ckptfmt.open(url, catalog=catalog, storage_options=_OPTIONS) as writer:
        backend = s3_backend(url, _OPTIONS)
        assert backend.list("runs") == []
        with writer.checkpointer("llama") as checkpointer:
            pending = checkpointer.save(_STATE, step=1)
            assert pending is not None
            pending.result()
        assert backend.list("runs")
        with ckptfmt.open(url, mode="r", storage_options=_OPTIONS) as reader:
            assert reader.latest("llama").step == 1
            with writer.checkpointer("llama") as checkpointer:
                pending = checkpointer.save(_STATE, step=2)
                assert pending is not None
                pending.result()
            assert reader.latest("llama").step == 2
        backend.close()


@pytest.mark.slow
def test_abandoned_uploads_are_swept_by_gc(url: str, catalog: str) -> None:
    with ckptfmt.open(url, catalog=catalog, storage_options=_OPTIONS) as repository:
        with repository.checkpointer("llama") as checkpointer:
            pending = checkpointer.save(_STATE, step=1)
            assert pending is not None
            generation = pending.result()
        backend = s3_backend(url, _OPTIONS)
        folder = next(info.key for info in backend.list("runs") if "COMMIT" in info.key).rpartition("/")[0]
        writer = backend.open_writer(f"{folder}/r00009-p000.safetensors", 20 << 20)
        writer.write_at(0, bytes(5 << 20))
        del writer
        seen = repository.gc(dry_run=True)
        assert [item.nbytes for item in seen.items] == [5 << 20]
        repository.gc(dry_run=False)
        assert backend.sweep_debris("", dry_run=True) == []
        assert np.array_equal(generation.load()["w"], _STATE["w"])
        backend.close()
