"""Which generation, and what happens when it cannot be read: none, unreadable and fallen back are three answers."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from content_fixtures import data_start, delete, exact, flip, manifest, packs

import ckptfmt
from ckptfmt import connect
from ckptfmt.errors import AccessDenied, OutOfSpace, Unavailable
from ckptfmt.generation import Generation


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((100,), value), "n": int(value)}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run ``a`` with ids 1 (step 10), 2 (step 20), 3 (step 15, after a rollback); run ``b`` with id 4 (step 20)."""
    place: Path = tmp_path_factory.mktemp("selection") / "repo"
    with ckptfmt.open(place) as repository:
        with repository.checkpointer("a") as checkpointer:
            checkpointer.save(state(1), step=10, tags=["first", "best"])
            checkpointer.save(state(2), step=20, tags=["best"])
            checkpointer.save(state(3), step=15)
        with repository.checkpointer("b") as checkpointer:
            checkpointer.save(state(4), step=20, tags=["best"])
    return place


@pytest.fixture
def place(original: Path, tmp_path: Path) -> Path:
    shutil.copytree(original, tmp_path / "repo")
    return tmp_path / "repo"


@pytest.fixture
def generations(place: Path) -> Iterator[dict[int, ckptfmt.Generation]]:
    with ckptfmt.open(place, mode="r") as repository:
        yield {number: repository.generation(number) for number in (1, 2, 3, 4)}


def loaded(*args: Any, **kwargs: Any) -> int:
    return int(ckptfmt.load(*args, **kwargs)["n"])


# -- naming a generation ----------------------------------------------------------------------------------
def test_latest_is_the_last_commit_never_the_highest_step(original: Path) -> None:
    assert loaded(original, run="a") == 3
    assert loaded(f"{original}#a") == 3
    assert loaded(original, run="b") == 4


def test_ids_steps_and_tags_everywhere(original: Path) -> None:
    for at, value in [(1, 1), ("1", 1), ("step:20", 2), ("step:15", 3), ("tag:first", 1), ("tag:best", 2), (None, 3)]:
        live = state(0)
        assert loaded(original, run="a", at=at) == value
        assert ckptfmt.restore(live, original, run="a", at=at).generation_id == value
        assert exact(live) == exact(state(value))
        suffix = "" if at is None else f"@{at}"
        assert loaded(f"{original}#a{suffix}") == value
        assert ckptfmt.restore(live, f"file://{original}#a{suffix}").generation_id == value
        with ckptfmt.open(f"{original}#a{suffix}", mode="r") as repository:
            assert repository.latest().id == value
    assert loaded(original, at=4) == 4, "an id needs no run"


def test_steps_and_ids_belong_to_a_run(original: Path) -> None:
    assert loaded(original, run="b", at="step:20") == 4
    assert loaded(original, run="b", at="tag:best") == 4
    with pytest.raises(ckptfmt.NotFound, match=r"no generation 4 in run 'a' \(it belongs to run 'b'\)"):
        ckptfmt.load(original, run="a", at=4)


@pytest.mark.parametrize(
    ("url", "options", "error", "message"),
    [
        ("{}", {}, ckptfmt.InvalidInput, r"several runs: 'a', 'b'"),
        ("{}", {"at": "step:20"}, ckptfmt.InvalidInput, r"several runs: 'a', 'b'"),
        ("{}", {"run": "c"}, ckptfmt.NotFound, r"no run 'c'; it has 'a', 'b'"),
        ("{}#c", {}, ckptfmt.NotFound, r"no run 'c'"),
        ("{}#a", {"run": "b"}, ckptfmt.InvalidInput, r"names run 'a' but run='b'"),
        ("{}#a@1", {"at": 2}, ckptfmt.InvalidInput, r"names '1' but at=2"),
        ("{}#a@", {}, ckptfmt.InvalidInput, "no reference"),
        ("{}#", {}, ckptfmt.InvalidInput, "no reference"),
        ("{}#a@newest", {}, ckptfmt.InvalidInput, "give a generation id"),
        ("{}#a", {"at": "step:x"}, ckptfmt.InvalidInput, "give a generation id"),
        ("{}#a", {"at": True}, ckptfmt.InvalidInput, "give a generation id"),
        ("{}#a", {"at": 99}, ckptfmt.NotFound, "no generation 99"),
        ("{}#a", {"at": "step:11"}, ckptfmt.NotFound, "no committed generation for step 11"),
        ("{}#a", {"at": "tag:worst"}, ckptfmt.NotFound, "no committed generation for tag 'worst'"),
        ("{}/absent", {}, ckptfmt.NotFound, "no ckptfmt repository"),
    ],
)
def test_what_is_not_there_is_said(original: Path, url: str, options: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        ckptfmt.load(url.format(original), **options)


def test_a_path_object_is_never_a_reference(tmp_path: Path) -> None:
    odd = tmp_path / "runs#1"
    ckptfmt.save({"n": 1}, odd)
    assert loaded(odd) == 1


def test_saving_by_reference(tmp_path: Path) -> None:
    assert ckptfmt.save({"n": 1}, f"{tmp_path}#lab").run == "lab"
    with pytest.raises(ckptfmt.InvalidInput, match="a save makes a new generation"):
        ckptfmt.save({"n": 1}, f"{tmp_path}#lab@step:3")
    with pytest.raises(ckptfmt.InvalidInput, match="names run 'lab' but run='other'"):
        ckptfmt.save({"n": 1}, f"{tmp_path}#lab", run="other")


def test_a_generations_folder_opens_by_itself(generations: dict[int, ckptfmt.Generation], tmp_path: Path) -> None:
    copied = tmp_path / "elsewhere"
    shutil.copytree(generations[2].url.removeprefix("file://"), copied)
    assert loaded(copied) == 2
    assert ckptfmt.restore(state(0), copied).generation_id == 2


def test_without_the_catalog_storage_proves_the_same(place: Path, generations: Any) -> None:
    assert loaded(place, run="a", catalog="none") == 3
    assert loaded(place, run="a", at="step:20", catalog="none") == 2
    assert loaded(place, run="a", at=1, catalog="none") == 1
    with pytest.raises(ckptfmt.InvalidInput, match="several runs: 'a', 'b'"):
        ckptfmt.load(place, catalog="none")
    with pytest.raises(ckptfmt.InvalidInput, match="tags are not on storage"):
        ckptfmt.load(place, run="a", at="tag:best", catalog="none")


# -- a checkpointer's restore -------------------------------------------------------------------------------
def test_a_fresh_run_restores_none_and_only_a_fresh_run(place: Path) -> None:
    live = state(0)
    with ckptfmt.open(place) as repository:
        with repository.checkpointer("new") as checkpointer:
            assert checkpointer.restore(live) is None
            assert checkpointer.restore(live, fallback=True) is None
            with pytest.raises(ckptfmt.NotFound, match="no generation 99"):
                checkpointer.restore(live, at=99)
            with pytest.raises(ckptfmt.NotFound, match="no generation yet"):
                checkpointer.restore(live, at="step:5")
        assert exact(live) == exact(state(0))
        with repository.checkpointer("a") as checkpointer:
            for at, value in [(None, 3), (1, 1), ("step:20", 2), ("tag:first", 1)]:
                report = checkpointer.restore(live, at=at)
                assert report is not None
                assert (report.generation_id, report.step) == (value, {1: 10, 2: 20, 3: 15}[value])
                assert exact(live) == exact(state(value))
                assert checkpointer.last_committed is not None
                assert checkpointer.last_committed.id == value


def test_the_next_save_continues_what_was_restored(place: Path, generations: Any) -> None:
    with ckptfmt.open(place) as repository, repository.checkpointer("a") as checkpointer:
        checkpointer.restore(state(0), at=1)
        pending = checkpointer.save(state(5), step=11)
        assert pending is not None
        assert pending.result().parent_key == generations[1].key


def test_fr082_unreadable_is_not_none(place: Path, generations: Any) -> None:
    for number in (1, 2, 3):
        flip(manifest(generations[number]), 40)
    live = state(0)
    with ckptfmt.open(place) as repository, repository.checkpointer("a") as checkpointer:
        for options in ({}, {"fallback": True}, {"strict": False}):
            with pytest.raises(ckptfmt.Corrupt, match="manifest-") as caught:
                checkpointer.restore(live, **options)
            assert generations[3].key in str(caught.value), "the newest one's damage is what is raised"
        with pytest.raises(ckptfmt.NotFound):
            checkpointer.restore(live, at=99, fallback=True)
        with pytest.raises(ckptfmt.Corrupt):
            checkpointer.restore(live, at=2, fallback=True)
    assert exact(live) == exact(state(0))
    with pytest.raises(ckptfmt.Corrupt):
        ckptfmt.load(place, run="a")


def test_fr082_falling_back_is_asked_for_loud_recorded_and_reported(
    place: Path, generations: Any, caplog: pytest.LogCaptureFixture
) -> None:
    delete(packs(generations[3])[0])
    flip(packs(generations[2])[0], data_start(packs(generations[2])[0]) + 3)
    live = state(0)
    with ckptfmt.open(place) as repository, repository.checkpointer("a") as checkpointer:
        with pytest.raises(ckptfmt.NotFound, match="is not there"):
            checkpointer.restore(live)
        assert exact(live) == exact(state(0))
        with caplog.at_level(logging.ERROR, logger="ckptfmt"):
            report = checkpointer.restore(live, fallback=True)
    assert report is not None
    assert (report.generation_id, report.fell_back_from) == (1, (3, 2))
    assert exact(live) == exact(state(1))
    assert "FELL BACK to generation 1" in caplog.text
    assert "generation 3 cannot be restored" in caplog.text
    assert "generation 2 cannot be restored" in caplog.text
    connection = connect.open_site(place, mode="r", catalog=None, storage_options=None)
    events = [event for event in connection.site.sql().events(run="a") if event.kind == "restore_fell_back"]
    connection.site.sql().close()
    assert len(events) == 1
    assert events[0].generation_id == 1
    assert events[0].detail["unreadable"] == [3, 2]


def test_fr082_a_mismatch_never_falls_back(place: Path) -> None:
    """The checkpoint is sound; it is the live state that differs: an older generation is no cure."""
    with (
        ckptfmt.open(place) as repository,
        repository.checkpointer("a") as checkpointer,
        pytest.raises(ckptfmt.Mismatch, match="generation 3"),
    ):
        checkpointer.restore({"w": torch.zeros(5), "n": 0}, fallback=True)


def test_fr083_quarantined_generations_are_not_the_latest(place: Path) -> None:
    connection = connect.open_site(place, mode="w", catalog=None, storage_options=None)
    connection.site.sql().quarantine(3, reason="loss is nan")
    connection.site.sql().close()
    assert loaded(place, run="a") == 2
    assert loaded(place, run="a", at=3) == 3, "named by id it can still be read"
    live = state(0)
    with ckptfmt.open(place) as repository:
        with repository.checkpointer("a") as checkpointer:
            report = checkpointer.restore(live)
            assert report is not None
            assert report.generation_id == 2
        (bad,) = [info for info in repository.generations(run="a") if info.id == 3]
        assert bad.quarantine_reason == "loss is nan"


def test_fallback_is_for_damage_not_for_a_place_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckptfmt.save({"a": np.arange(3)}, tmp_path, step=1)
    ckptfmt.save({"a": np.arange(3)}, tmp_path, step=2)
    into = {"a": np.zeros(3, dtype=np.int64)}
    with ckptfmt.open(tmp_path) as repo, repo.checkpointer() as ckpt:
        for error in (Unavailable("the mount is away"), AccessDenied("no permission"), OutOfSpace("no host memory")):
            with monkeypatch.context() as patched:
                patched.setattr(Generation, "restore_with", raising(error))
                with pytest.raises(type(error)):
                    ckpt.restore(into, fallback=True)
        report = ckpt.restore(into, fallback=True)
    assert report is not None
    assert (report.step, report.fell_back_from) == (2, ())


def raising(error: Exception) -> Callable[..., Any]:
    def restore_with(*arguments: Any, **keywords: Any) -> Any:
        raise error

    return restore_with
