"""A root that was copied or moved: what one does never reaches the other."""

from __future__ import annotations

import os
import shutil
from datetime import timedelta
from pathlib import Path

import pytest
from rebuild_rig import Told, assert_sound, make_history, save, site_of, told

import ckptfmt
from ckptfmt.cli.repair import repair_catalog
from ckptfmt.engine.keep.gc import collect, retire
from ckptfmt.errors import Conflict, InvalidInput

History = dict[str, list[Told]]


def contents(root: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


@pytest.fixture
def copy(root: Path, tmp_path: Path) -> Path:
    with site_of(root):
        pass  # the catalog knows that the root is here
    return Path(shutil.copytree(root, tmp_path / "copy"))


def work(root: Path) -> None:
    """Save, retire, delete."""
    save(root, 70)
    with site_of(root) as site:
        for run in site.sql().runs():
            site.sql().set_retention_hold(run.name, False)
        retire(site, 4)
        assert collect(site, dry_run=False, grace=timedelta(0)).items


def test_gc_on_a_copy_leaves_the_original_alone(root: Path, copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    original = contents(root)
    work(copy)
    assert contents(root) == original
    assert "db adopt" in caplog.text


def test_an_adopted_copy_is_told_from_its_original(root: Path, copy: Path, before: History) -> None:
    original = contents(root)
    report = repair_catalog(copy, how="adopt")
    with site_of(copy, mode="r") as mine, site_of(root, mode="r") as theirs:
        assert mine.repository == theirs.repository  # every verdict names it, and none is ever rewritten
        assert mine.sql().identity().uuid == report.uuid != theirs.sql().identity().uuid
        assert mine.sql().identity().epoch == report.epoch == 2
        best = mine.sql().tagged("train", "best")
        assert best is not None
        assert best.id == 3
    assert_sound(copy, before)
    work(copy)
    assert contents(root) == original
    assert_sound(root, before)
    for one, other in ((root, copy), (copy, root)):
        with pytest.raises(Conflict, match="governed by catalog"):
            ckptfmt.open(one, catalog=f"sqlite:///{other}/catalog.sqlite")


def test_an_adopted_copy_says_nothing_more(copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    repair_catalog(copy, how="adopt")
    caplog.clear()
    save(copy, 70)
    assert "copy of" not in caplog.text


@pytest.mark.slow
def test_a_copy_never_writes_to_the_external_catalog_of_its_original(tmp_path: Path) -> None:
    root, copy, catalog = tmp_path / "ckpts", tmp_path / "copy", f"sqlite:///{tmp_path}/outside.sqlite"
    make_history(root, catalog)
    shutil.copytree(root, copy)
    with site_of(root, catalog) as site:
        before = told(site)
    original, database = contents(root), (tmp_path / "outside.sqlite").read_bytes()
    with pytest.raises(Conflict, match="is a copy of") as caught:
        ckptfmt.open(copy, catalog=catalog)
    assert caught.value.kind == "copied_root"
    with pytest.raises(Conflict) as caught:
        repair_catalog(copy, how="adopt", catalog=catalog)
    assert caught.value.kind in ("copied_root", "launch_held")
    report = repair_catalog(copy, how="adopt")
    assert report.catalog.endswith("copy/catalog.sqlite")
    assert_sound(copy, before)
    work(copy)
    assert contents(root) == original
    assert (tmp_path / "outside.sqlite").read_bytes() == database
    assert_sound(root, before, catalog)


def test_a_copy_without_its_catalog_is_adopted_from_storage_alone(root: Path, copy: Path, before: History) -> None:
    (copy / "catalog.sqlite").unlink()
    original = contents(root)
    repair_catalog(copy, how="adopt")
    assert_sound(copy, before)
    work(copy)
    assert contents(root) == original


@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_a_copy_whose_catalog_is_the_originals_by_a_link_is_refused(root: Path, copy: Path, link: object) -> None:
    """``cp -al`` and ``cp -as``."""
    (copy / "catalog.sqlite").unlink()
    link(root / "catalog.sqlite", copy / "catalog.sqlite")  # type: ignore[operator]
    original = contents(root)
    with pytest.raises(Conflict, match="is a copy of"):
        ckptfmt.open(copy)
    with pytest.raises(Conflict, match="by a link"):
        repair_catalog(copy, how="adopt")
    assert contents(root) == original


def test_a_moved_root_is_no_copy(root: Path, before: History, caplog: pytest.LogCaptureFixture) -> None:
    with site_of(root):
        pass
    moved = root.with_name("moved")
    root.rename(moved)
    assert_sound(moved, before)
    with site_of(moved, mode="r") as site:
        assert site.sql().root_url() == moved.as_uri()
    assert "copy of" not in caplog.text


def test_another_way_to_the_same_root_is_no_copy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root, catalog = tmp_path / "ckpts", f"sqlite:///{tmp_path}/outside.sqlite"
    save(root, 1, catalog=catalog)
    (tmp_path / "way").symlink_to(root)
    assert save(tmp_path / "way", 2, catalog=catalog) == [2]
    assert save(root, 3, catalog=catalog) == [3]
    assert "copy of" not in caplog.text


def test_a_catalog_of_two_roots_is_rebuilt_for_one_and_followed_by_the_other(tmp_path: Path) -> None:
    one, other, catalog = tmp_path / "one", tmp_path / "other", f"sqlite:///{tmp_path}/shared.sqlite"
    save(one, 1, catalog=catalog)
    save(other, 2, catalog=catalog)
    with pytest.raises(InvalidInput):
        repair_catalog(one, how="rebuild", catalog=catalog)
    assert repair_catalog(one, how="merge", catalog=catalog).epoch == 2
    with ckptfmt.open(other, mode="r", catalog=catalog) as repository:
        assert repository.latest().step == 2
    save(other, 3, catalog=catalog)
    save(one, 4, catalog=catalog)
    assert sorted(path.name for path in (other / "catalogs").iterdir()) == ["00000001.json", "00000002.json"]
