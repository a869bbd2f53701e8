"""The catalog's file is gone, damaged or somebody else's: what storage proves comes back, and nothing else (FR-118)."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rebuild_rig import (
    Told,
    abort,
    assert_sound,
    assert_state,
    closed,
    goes_on,
    launch,
    make_history,
    save,
    site_of,
    told,
)

import ckptfmt
from ckptfmt.catalog import repair
from ckptfmt.cli.repair import repair_catalog
from ckptfmt.engine.contradictions import contradictions
from ckptfmt.engine.keep.gc import collect
from ckptfmt.errors import CatalogError, CkptError, Conflict, Fenced, InvalidInput, NotFound
from ckptfmt.format.states import State
from ckptfmt.launching import LaunchOrder

History = dict[str, list[Told]]


def _write(data: bytes) -> Callable[[Path], None]:
    return lambda file: (file.write_bytes(data), None)[1]


def _cut(share: float) -> Callable[[Path], None]:
    return lambda file: (file.write_bytes(file.read_bytes()[: int(file.stat().st_size * share)]), None)[1]


def _zero_a_page(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[3 * 4096 : 4 * 4096] = bytes(4096)
    file.write_bytes(data)


LOSSES: dict[str, Callable[[Path], None]] = {
    "deleted": lambda file: file.unlink(),
    "empty": _write(b""),
    "cut in the first page": _cut(0.005),
    "cut in the middle": _cut(0.5),
    "garbage": _write(b"\xff\xfe no database " * 3000),
    "first bytes": lambda file: (file.write_bytes(b"\0" * 100 + file.read_bytes()[100:]), None)[1],
    "a page of zeros": _zero_a_page,
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_lost_catalog_comes_back_from_storage(root: Path, before: History, loss: str) -> None:
    file = root / "catalog.sqlite"
    with site_of(root) as site:
        gone = closed(site)
        used = max(row.id for row in site.sql().generations())
    LOSSES[loss](file)
    damaged = file.read_bytes() if file.exists() else None
    report = repair_catalog(root, how="rebuild")
    assert report.set_aside == (None if damaged is None else "catalog.sqlite.aside-1")
    if damaged is not None:
        assert (root / "catalog.sqlite.aside-1").read_bytes() == damaged
    assert (report.epoch, report.left_out, report.quarantined) == (2, (), ())
    assert {one.action for one in report.changes} == {"restored"}
    assert {run.run: (run.committed, run.latest) for run in report.runs} == {
        run: (len(rows), rows[0][0]) for run, rows in before.items()
    }
    # The one whose slot was never closed has no verdict: it is told, and left alone.
    (unfinished,) = report.unfinished
    assert "no manifest: never committed" in unfinished.reason
    assert_sound(root, before)
    with site_of(root) as site:
        assert closed(site) == gone
        assert all(run.retention_hold for run in site.sql().runs())
    goes_on(root, used)
    assert list((root / unfinished.folder).iterdir())


def test_a_lost_catalog_is_told_with_the_way_back(root: Path) -> None:
    (root / "catalog.sqlite").unlink()
    with pytest.raises(CatalogError, match="db rebuild") as caught:
        ckptfmt.open(root)
    assert caught.value.kind == "catalog_missing"
    (root / "catalog.sqlite").write_bytes(b"garbage" * 1000)
    with pytest.raises(CatalogError, match="db rebuild") as caught:
        ckptfmt.open(root)
    assert caught.value.kind == "catalog_damaged"
    with pytest.raises(CatalogError, match=r"db rebuild file://"):
        repair_catalog(root, how="merge")
    assert not list(root.glob("catalog.sqlite.*"))


def test_a_journal_that_was_left_behind_is_not_rolled_into_the_new_file(root: Path, before: History) -> None:
    (root / "catalog.sqlite").unlink()
    for end in ("-journal", "-wal", "-shm"):
        (root / f"catalog.sqlite{end}").write_bytes(b"left behind")
    report = repair_catalog(root, how="rebuild")
    assert report.set_aside == "catalog.sqlite.aside-1"
    assert sorted(path.name for path in root.glob("catalog.sqlite*")) == [
        "catalog.sqlite",
        *(f"catalog.sqlite.aside-1{end}" for end in ("-journal", "-shm", "-wal")),
    ]
    assert_sound(root, before)


def test_what_is_kept_aside_is_never_overwritten(root: Path) -> None:
    for number in (1, 2):
        (root / "catalog.sqlite").write_bytes(b"garbage %d" % number)
        assert repair_catalog(root, how="rebuild").set_aside == f"catalog.sqlite.aside-{number}"
    assert (root / "catalog.sqlite.aside-1").read_bytes() == b"garbage 1"
    assert (root / "catalog.sqlite.aside-2").read_bytes() == b"garbage 2"


def test_a_sound_catalog_is_not_rebuilt(root: Path, before: History) -> None:
    with pytest.raises(InvalidInput, match="rebuild --merge"):
        repair_catalog(root, how="rebuild")
    assert_sound(root, before)
    assert [path.name for path in (root / "catalogs").iterdir()] == ["00000001.json"]


def test_what_is_no_repository_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        repair_catalog(tmp_path, how="rebuild")
    assert list(tmp_path.iterdir()) == []


def test_a_database_of_something_else_is_left_alone(root: Path, tmp_path: Path) -> None:
    import sqlite3

    (root / "catalog.sqlite").unlink()
    with sqlite3.connect(root / "catalog.sqlite") as connection:
        connection.execute("CREATE TABLE photos (x)")
    connection.close()
    with pytest.raises(CatalogError, match="something else"):
        repair_catalog(root, how="rebuild")
    assert not list(root.glob("catalog.sqlite.*"))


@pytest.mark.slow
def test_an_external_catalog_comes_back_too(tmp_path: Path) -> None:
    root, catalog = tmp_path / "ckpts", f"sqlite:///{tmp_path}/outside.sqlite"
    make_history(root, catalog)
    with site_of(root, catalog) as site:
        before = told(site)
    (tmp_path / "outside.sqlite").unlink()
    with pytest.raises(InvalidInput, match="--catalog"):
        repair_catalog(root, how="rebuild")
    assert repair_catalog(root, how="rebuild", catalog=catalog).epoch == 2
    assert_sound(root, before, catalog)
    assert not (root / "catalog.sqlite").exists()


def test_a_catalog_that_serves_others_is_no_place_for_a_lost_one(root: Path, tmp_path: Path) -> None:
    shared = f"sqlite:///{tmp_path}/shared.sqlite"
    save(tmp_path / "other", 1, catalog=shared)
    (root / "catalog.sqlite").unlink()
    with pytest.raises(InvalidInput, match="serves other repositories"):
        repair_catalog(root, how="rebuild", catalog=shared)


# -- damage on storage ----------------------------------------------------------------------------------
def _folder(root: Path, generation_id: int) -> Path:
    with site_of(root, mode="r") as site:
        row = site.sql().generation(generation_id)
    assert row is not None
    return root / "runs" / row.run_key / row.key


def _flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("name", ["manifest-*", "r00000-p000.safetensors"])
def test_a_committed_generation_that_cannot_be_read_is_quarantined(root: Path, before: History, name: str) -> None:
    newest, older = before["train"][0][0], before["train"][1][0]
    (damaged,) = _folder(root, newest).glob(name)
    damaged.write_bytes(damaged.read_bytes()[:-1])
    (root / "catalog.sqlite").unlink()
    report = repair_catalog(root, how="rebuild")
    (one,) = report.quarantined
    assert one.folder.endswith(damaged.parent.name)
    assert damaged.name in one.reason
    with ckptfmt.open(root) as repository:
        assert [info.id for info in repository.generations(run="train")] == [row[0] for row in before["train"]]
        assert repository.latest("train").id == older
        assert_state(repository.latest("train").load(), before["train"][1][2])
        with pytest.raises(CkptError):
            repository.generation(newest)
    assert save(root, 99)[0] > newest


def test_a_damaged_verdict_is_left_out_and_told(root: Path, before: History) -> None:
    newest = before["train"][0][0]
    folder = _folder(root, newest)
    _flip(folder / "COMMIT.json")
    (root / "catalog.sqlite").unlink()
    report = repair_catalog(root, how="rebuild")
    (one,) = report.left_out
    assert one.folder.endswith(folder.name)
    assert "COMMIT.json" in one.reason
    with ckptfmt.open(root) as repository:
        assert repository.latest("train").id == before["train"][1][0]
        assert any(folder.name in unknown for unknown in repository.gc().unknown)
    (new,) = save(root, 99)
    assert new > newest
    with site_of(root) as site:
        row = site.sql().generation(new)
        assert row is not None
        # Its hint still tells that the place in the order was taken.
        assert (row.epoch, row.commit_seq) == (2, before["train"][0][4] + 1)


def test_a_damaged_tombstone_deletes_nothing(root: Path, before: History) -> None:
    folder = _folder(root, 2)
    _flip(folder / "RETIRED.json")
    (root / "catalog.sqlite").unlink()
    (one,) = repair_catalog(root, how="rebuild").quarantined
    assert one.folder.endswith(folder.name)
    assert "tombstone" in one.reason
    with site_of(root) as site:
        row = site.sql().generation(2)
        assert row is not None
        assert (row.state, row.quarantined_at is None) == (State.COMMITTED, False)
        assert contradictions(site) == []


def test_folders_of_others_get_no_row(root: Path, before: History) -> None:
    """Copied under another key, from another repository, or into another run."""
    real = _folder(root, before["train"][0][0])
    shutil.copytree(real, real.with_name("f" * 32))
    shutil.copytree(real, _folder(root, before["other"][0][0]).with_name(real.name))
    foreign = root.with_name("foreign")
    save(foreign, 1)
    (theirs,) = (path.parent for path in foreign.glob("runs/*/*/COMMIT.json"))
    shutil.copytree(theirs, real.with_name(theirs.name))
    (root / "catalog.sqlite").unlink()
    report = repair_catalog(root, how="rebuild")
    reasons = " ".join(one.reason for one in report.left_out)
    assert len(report.left_out) == 3
    for words in ("another name", "another repository", "whose folder is"):
        assert words in reasons
    assert_sound(root, before)


def test_a_hint_that_was_lost_is_made_again(root: Path, before: History) -> None:
    for hint in root.glob("runs/*/commits/*"):
        hint.unlink()
    (root / "catalog.sqlite").unlink()
    repair_catalog(root, how="rebuild")
    assert_sound(root, before)
    assert ckptfmt.load(root, run="train", catalog="none")["seed"] == 45


# -- who may ---------------------------------------------------------------------------------------------
def test_one_at_a_time(root: Path, before: History) -> None:
    (root / "catalog.sqlite").unlink()
    with repair.exclusive(f"sqlite:///{root}/catalog.sqlite"):
        with pytest.raises(Conflict) as caught:
            repair_catalog(root, how="rebuild")
        assert caught.value.kind == "rebuild_running"
    assert [path.name for path in (root / "catalogs").iterdir()] == ["00000001.json"]
    repair_catalog(root, how="rebuild")
    assert_sound(root, before)


def test_of_two_catalogs_one_claims_the_epoch(
    root: Path, before: History, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have read the same claims; the second is told, and its catalog governs nothing."""
    from ckptfmt.engine.keep import rebuild as room

    (root / "catalog.sqlite").unlink()
    gather = room.gather

    def be_overtaken(*args: object) -> object:
        monkeypatch.setattr(room, "gather", gather)
        repair_catalog(root, how="rebuild")
        return gather(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(room, "gather", be_overtaken)
    other = f"sqlite:///{tmp_path}/aside/other.sqlite"
    (tmp_path / "aside").mkdir()
    with pytest.raises(Conflict) as caught:
        repair_catalog(root, how="rebuild", catalog=other)
    assert caught.value.kind == "epoch_claimed"
    with pytest.raises(Conflict):
        ckptfmt.open(root, catalog=other)
    assert_sound(root, before)


def test_a_live_launch_is_not_disturbed_by_a_merge(root: Path) -> None:
    with site_of(root) as site:
        launch(site, "train")
    with pytest.raises(Conflict) as caught:
        repair_catalog(root, how="merge")
    assert caught.value.kind == "launch_held"
    assert [path.name for path in (root / "catalogs").iterdir()] == ["00000001.json"]


def test_whoever_was_open_before_is_fenced(root: Path) -> None:
    """Its launch is unknown to the new catalog, or its fence is too low: it commits nothing any more."""
    with ckptfmt.open(root) as repository:
        checkpointer = repository.checkpointer("train")
        (root / "catalog.sqlite").unlink()
        repair_catalog(root, how="rebuild")
        (new,) = save(root, 60)
        with pytest.raises(CkptError, match="open the repository again"):
            checkpointer.save(state_of_a_late_one(), step=61).result()
        checkpointer.close()
    with ckptfmt.open(root) as repository:
        assert repository.latest("train").id == new
        assert next(iter(repository.generations(run="train"))).step == 60


def test_a_lease_that_the_catalog_has_forgotten_is_lost_and_its_watchdog_lives(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LaunchOrder, "beat_seconds", 0.05)
    with ckptfmt.open(root) as repository, repository.checkpointer("train") as checkpointer:
        (root / "catalog.sqlite").unlink()
        repair_catalog(root, how="rebuild")
        lease = checkpointer._lease
        until = time.monotonic() + 30
        while lease.fenced is None and time.monotonic() < until:
            lease._renew_after = 0.0  # at the next beat
            time.sleep(0.02)
        with pytest.raises(Fenced, match=r"run 'train': the catalog .* has no launch \d+ .* open the repository again"):
            checkpointer.save(state_of_a_late_one(), step=61)
        assert lease._heartbeat._thread.is_alive()


def state_of_a_late_one() -> dict[str, int]:
    return {"seed": 61}


def test_gc_through_a_connection_from_before_deletes_nothing(root: Path, tmp_path: Path) -> None:
    """The root got another catalog since: whoever has the old one open must not delete by it."""
    with site_of(root) as site:
        abort(site, step=80)
        files = sorted(path for path in (root / "runs").rglob("*"))
        other = f"sqlite:///{tmp_path}/other.sqlite"
        repair_catalog(root, how="rebuild", catalog=other)
        with pytest.raises(Conflict, match="is governed by catalog"):
            collect(site, dry_run=False)
        assert sorted(path for path in (root / "runs").rglob("*")) == files
