"""The catalog went back in time: it is noticed before anything is written or deleted, and brought up to date."""

from __future__ import annotations

import json
import shutil
import threading
from datetime import timedelta
from pathlib import Path

import pytest
from rebuild_rig import Told, abort, assert_sound, closed, goes_on, save, site_of, state, sweep, told

import ckptfmt
from ckptfmt.catalog import repair
from ckptfmt.cli.repair import repair_catalog
from ckptfmt.engine.contradictions import contradictions
from ckptfmt.engine.keep.gc import collect, retire
from ckptfmt.errors import CatalogBehind, CkptError, Conflict, FormatError
from ckptfmt.format import checksum
from ckptfmt.format.states import State

History = dict[str, list[Told]]


def put_back(root: Path, copy: Path) -> None:
    """As an operator does: the file is replaced."""
    shutil.copy(copy, root / "incoming")
    (root / "incoming").replace(root / "catalog.sqlite")


@pytest.fixture
def yesterday(root: Path) -> Path:
    """A copy of the catalog, taken while nobody had it open."""
    return Path(shutil.copy(root / "catalog.sqlite", root.with_name("yesterday.sqlite")))


def files(root: Path) -> list[str]:
    return sorted(str(path) for path in (root / "runs").rglob("*"))


def test_yesterdays_copy_is_noticed_and_merged(root: Path, yesterday: Path) -> None:
    with site_of(root) as site:
        site.sql().pin(5, reason="a paper")
    shutil.copy(root / "catalog.sqlite", yesterday)
    new = save(root, 61, 62)
    with site_of(root) as site:
        retire(site, new[0])
        retire(site, 4)
        abort(site, step=79)
        collect(site, dry_run=False, grace=timedelta(0))
        after, gone = told(site), closed(site)
        used = max(row.id for row in site.sql().generations())
    put_back(root, yesterday)
    there = files(root)
    with pytest.raises(CatalogBehind, match=f"run 'train': .*#{new[1]} .committed on storage, unknown in the catalog."):
        ckptfmt.open(root)
    with site_of(root, mode="r") as site, pytest.raises(CatalogBehind, match="rebuild --merge"):
        collect(site, dry_run=True)
    assert files(root) == there
    with ckptfmt.open(root, mode="r") as repository:  # reading what it knows is no harm
        assert repository.latest("train").step == 45
    report = repair_catalog(root, how="merge")
    assert (report.epoch, report.set_aside, report.left_out) == (2, None, ())
    actions = {one.generation_id: one.action for one in report.changes}
    assert actions[new[1]] == "restored"
    assert actions[4] == "retired"
    assert_sound(root, after)
    with site_of(root) as site:
        for key, state_then in gone.items():
            row = site.sql().generation_by_key(key)
            assert row is not None
            # What was swept since is swept once more.
            assert row.state in (State(state_then), State.RETIRED, State.ABORTED)
        row = site.sql().generation(5)
        assert row is not None
        assert row.pinned
        best = site.sql().tagged("train", "best")
        assert best is not None
        assert best.id == 3
    goes_on(root, used)


@pytest.mark.parametrize("what", ["commit", "abort", "retire", "delete"])
def test_each_thing_that_storage_proves_is_noticed(root: Path, yesterday: Path, what: str) -> None:
    if what == "commit":
        save(root, 61)
    with site_of(root) as site:
        if what == "abort":
            abort(site)
            sweep(site)
        elif what in ("retire", "delete"):
            retire(site, 4)
        if what == "delete":
            sweep(site)
        after = told(site)
    put_back(root, yesterday)
    with pytest.raises(CatalogBehind):
        ckptfmt.open(root)
    repair_catalog(root, how="merge")
    assert_sound(root, after)


def test_merging_twice_changes_nothing_more(root: Path, yesterday: Path) -> None:
    save(root, 61)
    with site_of(root) as site:
        after = told(site)
    put_back(root, yesterday)
    first, second = repair_catalog(root, how="merge"), repair_catalog(root, how="merge")
    assert len(first.changes) == 1
    assert (second.changes, second.unchanged) == ((), first.unchanged + 1)
    assert second.epoch == first.epoch + 1
    assert_sound(root, after)


def test_ids_and_fences_of_the_lost_time_are_not_handed_out_again(root: Path, yesterday: Path) -> None:
    """Also those of generations and launches that left nothing on storage."""
    with site_of(root) as site:
        row = abort(site, step=79)
        shutil.rmtree(root / "runs" / row.run_key / row.key)
        lost_launch = site.sql().launches("train")[0]
    put_back(root, yesterday)
    repair_catalog(root, how="merge")
    (new,) = save(root, 99)
    with site_of(root) as site:
        launch = site.sql().launches("train")[0]
    assert new > row.id
    assert launch.id > lost_launch.id
    assert launch.fence > lost_launch.fence


def test_a_copy_from_before_a_rebuild_is_of_an_older_epoch(root: Path, yesterday: Path, before: History) -> None:
    repair_catalog(root, how="merge")
    put_back(root, yesterday)
    for mode in ("r", "w"):
        with pytest.raises(CatalogBehind, match="governed by epoch 2"):
            ckptfmt.open(root, mode=mode)  # type: ignore[arg-type]
    assert repair_catalog(root, how="merge").epoch == 3
    assert_sound(root, before)


def test_who_saves_on_across_the_loss_is_told_apart(root: Path) -> None:
    """A launch stays open while the file under it is replaced by one that knows it, and saves on: two generations claim
    one place. One keeps it; the other is told, stays where it is, and is no news again."""
    copy = root.with_name("live.sqlite")
    with ckptfmt.open(root) as repository, repository.checkpointer("train") as checkpointer:
        shutil.copy(root / "catalog.sqlite", copy)
        first = checkpointer.save(state(61), step=61).result()
        checkpointer.wait()
        put_back(root, copy)
        second = checkpointer.save(state(62), step=62).result()
        assert first.id == second.id  # it was handed out twice: nobody could know
    with pytest.raises(CatalogBehind):
        ckptfmt.open(root)
    report = repair_catalog(root, how="merge")
    (left_out,) = report.left_out
    assert "two catalogs" in left_out.reason
    with ckptfmt.open(root) as repository:
        assert repository.latest("train").step == 62
        assert any(left_out.folder in unknown for unknown in repository.gc().unknown) or repository.gc().held
    with site_of(root) as site:
        assert contradictions(site) == []
    assert list((root / left_out.folder).glob("*.safetensors"))
    (new,) = save(root, 63)
    assert new > second.id


def test_a_zombie_cannot_go_on_after_a_merge(root: Path, yesterday: Path) -> None:
    with ckptfmt.open(root) as repository:
        checkpointer = repository.checkpointer("train")
        checkpointer.save(state(61), step=61).result()
        put_back(root, yesterday)
        repair_catalog(root, how="merge")
        with pytest.raises(CkptError):
            checkpointer.save(state(62), step=62).result()
        checkpointer.close()
    with ckptfmt.open(root, mode="r") as repository:
        assert repository.latest("train").step == 61


@pytest.mark.slow
def test_a_copy_taken_while_others_write_is_merged_or_rebuilt(root: Path) -> None:
    """``cp`` of a live file: torn, older, or both. Whatever it is, nothing committed is lost."""
    stop = threading.Event()
    copies = [root.with_name(f"live-{number}.sqlite") for number in range(4)]

    def write() -> None:
        with site_of(root) as site:
            number = 0
            while not stop.is_set():
                site.sql().tag(3, f"t{number % 7}")
                number += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for copy in copies:
            with (root / "catalog.sqlite").open("rb") as source, copy.open("wb") as target:
                while block := source.read(4096):
                    target.write(block)
    finally:
        stop.set()
        writer.join()
    save(root, 61)
    with site_of(root) as site:
        after = told(site)
    for copy in copies:
        put_back(root, copy)
        sound = repair.condition(f"sqlite:///{root}/catalog.sqlite").state == "sound"
        repair_catalog(root, how="merge" if sound else "rebuild")
        assert_sound(root, after)


def test_a_verdict_on_a_run_that_cannot_be_stops_nothing(root: Path, before: History) -> None:
    """One sealed object of somebody's making, in a folder that the catalog does not know."""
    (run_key, key) = next(iter((root / "runs").glob("*/*/COMMIT.json"))).parts[-3:-1]
    made = root / "runs" / run_key / ("f" * 32)
    made.mkdir()
    record = json.loads((root / "runs" / run_key / key / "COMMIT.json").read_bytes())
    del record["self_digest"]
    body = json.dumps(record | {"run": "a#b", "key": made.name}, separators=(",", ":")).encode()[:-1]
    digest = checksum.hex_digest(body).encode()
    (made / "COMMIT.json").write_bytes(body + b',"self_digest":"' + digest + b'"}\n')
    with ckptfmt.open(root) as repository:
        assert any(made.name in unknown for unknown in repository.gc().unknown)
    (one,) = repair_catalog(root, how="merge").left_out
    assert "is of no run" in one.reason
    assert_sound(root, before)


def test_a_strangers_catalog_is_not_merged(root: Path, before: History, tmp_path: Path) -> None:
    """A catalog that never governed this root, in the place of the one that does."""
    save(tmp_path / "other", 1)
    own = (root / "catalog.sqlite").read_bytes()
    shutil.copy(tmp_path / "other" / "catalog.sqlite", root / "catalog.sqlite")
    there = files(root)
    for mode in ("r", "w"):
        with pytest.raises(Conflict):
            ckptfmt.open(root, mode=mode)  # type: ignore[arg-type]
    with pytest.raises(CkptError):
        repair_catalog(root, how="merge")
    assert files(root) == there
    assert [path.name for path in (root / "catalogs").iterdir()] == ["00000001.json"]
    (root / "catalog.sqlite").write_bytes(own)
    assert_sound(root, before)


def test_a_fresh_catalog_under_the_right_name_commits_and_deletes_nothing(root: Path, before: History) -> None:
    from ckptfmt.catalog.open import open_catalog

    own = (root / "catalog.sqlite").read_bytes()
    (root / "catalog.sqlite").unlink()
    with site_of(root, catalog="none", mode="r") as site:
        repository = site.repository
    url = f"sqlite:///{root}/catalog.sqlite"
    open_catalog(url, repository=repository, display_url=root.as_uri(), mode="w", create=True).close()
    there = files(root)
    with pytest.raises(Conflict, match="governed by catalog"):
        ckptfmt.open(root)
    with pytest.raises(Conflict):
        repair_catalog(root, how="merge")
    assert files(root) == there
    (root / "catalog.sqlite").write_bytes(own)
    assert_sound(root, before)


def test_what_others_do_meanwhile_is_no_contradiction(root: Path) -> None:
    """Storage follows the catalog, so a look at any moment agrees."""
    seen = []
    stop = threading.Event()

    def look() -> None:
        with site_of(root) as site:
            while not stop.is_set():
                seen.append(contradictions(site))

    with ckptfmt.open(root) as repository, repository.checkpointer("train") as checkpointer:
        looker = threading.Thread(target=look)
        looker.start()
        for number in range(6):
            checkpointer.save(state(100 + number), step=100 + number).result()
        with site_of(root) as site:
            retire(site, checkpointer.last_committed.id - 1)  # type: ignore[union-attr]
            sweep(site)
        stop.set()
        looker.join()
    assert seen
    assert not any(seen)


def test_a_damaged_claim_is_followed_by_a_new_one(root: Path, before: History) -> None:
    claim = root / "catalogs" / "00000001.json"
    claim.write_bytes(claim.read_bytes()[:-3])
    with pytest.raises(FormatError, match=r"00000001\.json"):
        ckptfmt.open(root)
    assert repair_catalog(root, how="merge").epoch == 2
    assert_sound(root, before)
