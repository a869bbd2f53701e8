"""Which generation is the latest: by commit, never by step, name, time or what lies around. And reading by proof."""

from __future__ import annotations

import dataclasses
import os
import shutil
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lifecycle_rig import Place, Process, assert_state, named, state_of

import ckptfmt
from ckptfmt.engine.keep import gc as collecting
from ckptfmt.engine.load.resolve import Wanted, open_wanted
from ckptfmt.errors import CatalogError, Conflict, Corrupt, FormatError, InvalidInput, NotCommitted, NotFound
from ckptfmt.format import layout
from ckptfmt.format.states import State
from ckptfmt.testing.faults import Fault


def _save(process: Process, *steps: int, **options: Any) -> None:
    with process.checkpointer(**options) as checkpointer:
        for step in steps:
            checkpointer.save(state_of(step), step=step)


# -- by the catalog -----------------------------------------------------------------------------------
@pytest.mark.parametrize("steps", [(960_000, 1_080_000), (1_080_000, 960_000), (9, 10, 100), (1000, 999, 9999, 10)])
def test_the_latest_is_the_last_commit_whatever_its_step(place: Place, steps: tuple[int, ...]) -> None:
    process = place.open()
    _save(process, *steps)
    assert process.repository.latest().step == steps[-1]
    listed = [info.step for info in process.repository.generations(run="run")]
    assert listed == list(reversed(steps))


def test_after_a_rollback_the_new_lineage_is_the_latest(place: Place) -> None:
    process = place.open()
    _save(process, 900, 1000)
    old = {info.step: info for info in process.repository.generations(run="run")}
    with process.checkpointer() as checkpointer:
        report = checkpointer.restore(dict.fromkeys(state_of(0)), at="step:900", strict=False)
        assert report is not None
        assert report.step == 900
        checkpointer.save(state_of(901), step=901)
    latest = process.repository.latest()
    assert latest.step == 901
    assert latest.parent_key == old[900].key
    with process.checkpointer() as checkpointer:
        report = checkpointer.restore(dict.fromkeys(state_of(0)), strict=False)
        assert report is not None
        assert report.step == 901


def test_the_same_step_twice_is_two_generations_and_the_later_is_taken(place: Place) -> None:
    process = place.open()
    _save(process, 5)
    _save(process, 5)
    first, second = process.rows()
    assert first.key != second.key
    assert process.repository.latest().id == second.id
    folders = {key.split("/")[2] for key in process.objects() if "/commits/" not in key}
    assert folders == {first.key, second.key}


def test_clocks_and_file_times_decide_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FR-040: equal times, times set to zero, and a clock that goes back."""
    with ckptfmt.open(root) as repository, repository.checkpointer("run") as checkpointer:
        monkeypatch.setattr(time, "time", lambda: 1.7e9)
        for step in (30, 20, 10):
            checkpointer.save(state_of(step), step=step)
        checkpointer.wait()
        for path in sorted((root / "runs").rglob("*")):
            os.utime(path, (0, 0))
        monkeypatch.setattr(time, "time", lambda: 1.7e9 - 3600)
        checkpointer.save(state_of(5), step=5)
        checkpointer.wait()
        assert repository.latest("run").step == 5
    monkeypatch.undo()
    with ckptfmt.open(root, mode="r", catalog="none") as repository:
        assert repository.latest("run").step == 5
        assert [info.step for info in repository.generations(run="run")] == [5, 10, 20, 30]


def test_the_latest_does_not_wait_for_one_that_is_being_written(place: Place) -> None:
    hold = threading.Event()
    process = place.open()
    _save(process, 10)
    fault = process.backend.add(Fault("write_at", hold=hold))
    with process.checkpointer() as checkpointer:
        pending = checkpointer.save(state_of(20), step=20)
        assert fault.reached.wait(10)
        assert process.repository.latest().step == 10
        assert [info.step for info in process.repository.generations(run="run", state=None)] == [10, 20]
        assert pending is not None
        with pytest.raises(NotCommitted, match="writing"):
            process.repository.generation(process.row().id)
        hold.set()
    assert process.repository.latest().step == 20


def test_none_exist_and_none_is_committed_are_two_answers(place: Place) -> None:
    process = place.open()
    with process.checkpointer() as checkpointer:
        assert checkpointer.restore({}) is None
    with pytest.raises(NotFound) as caught:
        process.repository.latest("run")
    assert not isinstance(caught.value, NotCommitted)
    process.backend.add(Fault("write_at", error=process.kill))
    dead = process.checkpointer()
    pending = dead.save(state_of(1), step=1)
    assert pending is not None
    pending.exception()
    fresh = place.open()
    before = fresh.objects()
    with pytest.raises(NotCommitted, match="none that is committed: #1 writing"):
        fresh.repository.latest("run")
    assert fresh.objects() == before


def test_a_run_whose_generations_all_went_is_no_fresh_start(place: Place) -> None:
    process = place.open()
    _save(process, 1)
    process.catalog.quarantine(process.row().id, reason="loss spike")
    with process.checkpointer() as checkpointer, pytest.raises(NotFound):
        checkpointer.restore(dict.fromkeys(state_of(0)), strict=False)


def test_falling_back_is_opt_in_loud_and_recorded(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    process = place.open()
    _save(process, 1, 2)
    row = process.row()
    process.backend._inner.delete(f"runs/{row.run_key}/{row.key}/r00000-p000.safetensors")  # type: ignore[attr-defined]
    with process.checkpointer() as checkpointer:
        with pytest.raises(NotFound, match=r"r00000-p000\.safetensors"):
            checkpointer.restore(dict.fromkeys(state_of(0)), strict=False)
        report = checkpointer.restore(dict.fromkeys(state_of(0)), strict=False, fallback=True)
        assert report is not None
        assert (report.step, report.fell_back_from) == (1, (row.id,))
    assert "FELL BACK" in caplog.text
    assert "restore_fell_back" in process.events()


# -- by proof -----------------------------------------------------------------------------------------
@pytest.fixture
def made(root: Path) -> Path:
    """A repository on disk with steps 1, 2 and 3 of one run."""
    with ckptfmt.open(root) as repository, repository.checkpointer("run") as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(state_of(step), step=step, metadata={"loss": step / 10})
    return root


def _folder(root: Path, step: int) -> Path:
    with ckptfmt.open(root, mode="r", catalog="none") as repository:
        key = next(info.key for info in repository.generations(run="run") if info.step == step)
    return root / layout.generation_folder(layout.run_key("run"), key)


def test_reading_by_proof_needs_no_catalog(made: Path) -> None:
    (made / "catalog.sqlite").unlink()
    before = sorted(str(path) for path in made.rglob("*"))
    with ckptfmt.open(made, mode="r", catalog="none") as repository:
        latest = repository.latest("run")
        assert_state(latest.load(), 3)
        assert latest.metadata == {"loss": 0.3}
        assert latest.verify().ok
        assert [info.step for info in repository.generations()] == [3, 2, 1]
        assert_state(repository.generation(1).load(), 1)
        assert [(run.name, run.committed) for run in repository.runs()] == [("run", 3)]
        for call in (repository.recover, repository.gc, lambda: repository.checkpointer("run")):
            with pytest.raises(InvalidInput, match="reading"):
                call()  # type: ignore[operator]
    assert_state(ckptfmt.load(made, run="run", at="step:2", catalog="none"), 2)
    assert sorted(str(path) for path in made.rglob("*")) == before


def test_a_lost_catalog_is_an_error_that_names_the_way_out(made: Path) -> None:
    (made / "catalog.sqlite").unlink()
    for mode in ("r", "w"):
        with pytest.raises(CatalogError, match='catalog="none"'):
            ckptfmt.open(made, mode=mode)  # type: ignore[arg-type]
    with pytest.raises(CatalogError):
        ckptfmt.load(made)
    assert not (made / "catalog.sqlite").exists()


def test_a_copied_folder_opens_verifies_and_can_be_sliced(made: Path, tmp_path: Path) -> None:
    shutil.copytree(_folder(made, 2), tmp_path / "elsewhere" / "copy")
    shutil.rmtree(made)
    assert_state(ckptfmt.load(tmp_path / "elsewhere" / "copy"), 2)
    with ckptfmt.open(tmp_path / "elsewhere" / "copy", mode="r") as repository:
        generation = repository.latest()
        assert (generation.step, generation.run) == (2, "run")
        assert generation.verify().ok
        np.testing.assert_array_equal(np.asarray(generation["w"][10:20]), state_of(2)["w"][10:20])
    with pytest.raises(InvalidInput, match="folder"):
        ckptfmt.open(tmp_path / "elsewhere" / "copy", mode="w")


def test_a_copied_repository_opens_whole_and_its_gc_stays_at_home(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made, tmp_path / "copy")
    original = {path: path.read_bytes() for path in sorted(made.rglob("*")) if path.is_file()}
    with ckptfmt.open(tmp_path / "copy") as repository:
        ids = [info.id for info in repository.generations(run="run")]
        site = repository._connection.site
        collecting.retire(site, ids[-1])
        assert collecting.collect(site, dry_run=False, grace=timedelta(0)).items
        assert repository.latest().verify().ok
    assert {path: path.read_bytes() for path in sorted(made.rglob("*")) if path.is_file()} == original


def test_a_strangers_catalog_is_refused_and_deletes_nothing(made: Path, tmp_path: Path) -> None:
    before = sorted(str(path) for path in made.rglob("*"))
    with pytest.raises(Conflict, match="governed by catalog"):
        ckptfmt.open(made, mode="w", catalog=f"sqlite:///{tmp_path}/stranger.sqlite")
    assert sorted(str(path) for path in made.rglob("*")) == before
    with ckptfmt.open(made, mode="r") as repository:
        assert repository.latest().verify().ok


def test_hints_that_nothing_proves_are_skipped(made: Path) -> None:
    commits = made / layout.commits_folder(layout.run_key("run"))
    (commits / f"00000001-000000000099-{'0' * 32}").touch()
    real = _folder(made, 1).name
    (commits / f"00000001-000000000098-{real}").touch()  # a true key under a false number
    (commits / "latest").touch()
    (_folder(made, 3) / "COMMIT.json").unlink()
    (made / "catalog.sqlite").unlink()
    with ckptfmt.open(made, mode="r", catalog="none") as repository:
        assert repository.latest().step == 2
        assert [info.step for info in repository.generations(run="run")] == [2, 1]


def test_a_damaged_verdict_is_an_error_for_its_own_generation_only(made: Path) -> None:
    verdict = _folder(made, 2) / "COMMIT.json"
    data = bytearray(verdict.read_bytes())
    data[50] ^= 1
    verdict.write_bytes(bytes(data))
    with ckptfmt.open(made, mode="r", catalog="none") as repository:
        assert repository.latest().step == 3
        assert_state(repository.generation(1).load(), 1)
        with pytest.raises(Corrupt, match=r"COMMIT\.json"):
            repository.generation(2)
    with ckptfmt.open(made, mode="r") as repository:
        assert_state(repository.latest().load(), 3)


def test_a_damaged_older_manifest_harms_neither_the_newest_nor_the_next_save(made: Path) -> None:
    """FR-012."""
    (manifest,) = _folder(made, 1).glob("manifest-*")
    manifest.write_bytes(b"\xff\xfe")
    with ckptfmt.open(made) as repository:
        with pytest.raises(FormatError, match=manifest.name):
            repository.generation(repository.generations(run="run")[-1].id)
        assert_state(repository.latest().load(), 3)
        with repository.checkpointer("run") as checkpointer:
            report = checkpointer.restore(dict.fromkeys(state_of(0)), strict=False)
            assert report is not None
            assert report.step == 3
            checkpointer.save(state_of(4), step=4)
        assert repository.latest().step == 4


def test_another_generations_verdict_proves_nothing(made: Path) -> None:
    other = (_folder(made, 1) / "COMMIT.json").read_bytes()
    target = _folder(made, 3) / "COMMIT.json"
    target.unlink()
    target.write_bytes(other)
    with ckptfmt.open(made, mode="r", catalog="none") as repository, pytest.raises(Corrupt, match="verdict on"):
        repository.latest()


def test_aborted_and_retired_generations_do_not_open_by_proof(place: Place) -> None:
    process = place.open()
    _save(process, 1, 2)
    collecting.retire(process.site, process.rows()[0].id)
    process.backend.add(Fault("create", error=lambda: Conflict("taken"), when=named("part.json")))
    with process.checkpointer() as checkpointer:
        pending = checkpointer.save(state_of(3), step=3)
        assert pending is not None
        assert pending.exception() is not None
    retired, kept, aborted = process.rows()
    assert [row.state for row in (retired, kept, aborted)] == [State.RETIRED, State.COMMITTED, State.DELETED]
    site = dataclasses.replace(process.site, catalog=None)
    assert open_wanted(site, "run", Wanted()).info.id == kept.id
    for row in (retired, aborted):
        with pytest.raises(NotCommitted):
            open_wanted(site, "run", Wanted(id=row.id))
        with pytest.raises(NotCommitted):
            process.repository.generation(row.id)


def test_reading_an_absent_repository_creates_nothing(tmp_path: Path) -> None:
    for catalog in (None, "none"):
        with pytest.raises(NotFound, match="no ckptfmt repository"):
            ckptfmt.open(tmp_path / "absent", mode="r", catalog=catalog)
    with pytest.raises(NotFound):
        ckptfmt.load(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFound):
        ckptfmt.open(tmp_path / "empty", mode="r")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty"]
    assert not list((tmp_path / "empty").iterdir())
    with pytest.raises(InvalidInput, match="needs a catalog"):
        ckptfmt.open(tmp_path / "new", mode="w", catalog="none")


def test_a_root_whose_path_has_special_characters_is_governed_by_its_own_catalog(tmp_path: Path) -> None:
    root = tmp_path / "a%41 é?#x"
    ckptfmt.save({"a": 1}, root)
    assert b'"location":"embedded"' in next((root / "catalogs").iterdir()).read_bytes()
    ckptfmt.save({"a": 2}, root)
    with ckptfmt.open(root, mode="r") as repository:
        assert [info.id for info in repository.generations()] == [2, 1]


def test_a_root_with_an_external_catalog_never_gets_a_second_one(tmp_path: Path) -> None:
    root = tmp_path / "r"
    ckptfmt.save({"a": 1}, root, catalog=f"sqlite:///{tmp_path}/catalog.sqlite")
    with pytest.raises(InvalidInput, match="external catalog"):
        ckptfmt.open(root)
    with pytest.raises(Conflict, match="is not that one"):
        ckptfmt.open(root, catalog=f"sqlite:///{tmp_path}/typo.sqlite")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["catalog.sqlite", "r"]
    assert sorted(path.name for path in root.iterdir()) == ["catalogs", "ckptfmt.json", "runs"]
    assert ckptfmt.load(root) == {"a": 1}  # no catalog is named: by proof
