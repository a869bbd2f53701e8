"""``ckptfmt replicate``: what replicas lack, catching up, and repair; nothing is ever written over."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from json_contract import check_report
from reading_rig import CHUNK, same

import ckptfmt
from ckptfmt.cli.main import main
from ckptfmt.engine.keep.gc import collect
from ckptfmt.format import layout

RUN = "r"


def state(step: int) -> dict[str, Any]:
    rng = np.random.default_rng(step)
    return {"big": rng.integers(0, 255, CHUNK + 4097, np.uint8), "odd": rng.integers(1, 9, 333, np.int8)}


@dataclass
class Repository:
    """Three generations on a durable tier whose catalog knows a stage and a replica, of which the replica is whole."""

    root: Path
    stage: Path
    replica: Path
    capsys: pytest.CaptureFixture[str]
    folders: list[str] = field(default_factory=list)

    def run(self, *arguments: str, code: int = 0) -> dict[str, Any]:
        with pytest.raises(SystemExit) as ended:
            main(["replicate", *arguments, "--json"])
        out, err = self.capsys.readouterr()
        assert int(ended.value.code or 0) == code, (out, err)
        document = json.loads(out)
        if "error" not in document:
            check_report(document)
        return document

    def folder(self, root: Path, number: int) -> Path:
        (found,) = root.rglob(self.folders[number].rpartition("/")[2])
        return found

    def pack(self, root: Path, number: int) -> Path:
        return self.folder(root, number) / "r00000-p000.safetensors"

    def damage(self, root: Path, number: int, *, name: str = "big", chunk: int = 0) -> None:
        with ckptfmt.open(self.root, mode="r", catalog="none") as repo:
            box = repo.generation(number + 1)._opened.stored.find(name, None).boxes[0]
        path = self.pack(root, number)
        data = bytearray(path.read_bytes())
        data[box.offset + chunk * CHUNK] ^= 1
        path.write_bytes(data)

    def loads(self, place: Path, number: int, **options: Any) -> None:
        same(ckptfmt.load(place, run=RUN, at=number + 1, **options), state(number))

    def events(self, kind: str) -> list[Any]:
        with ckptfmt.open(self.root) as repo:
            return [event for event in repo._connection.site.sql().events() if event.kind == kind]


Make = Callable[..., Repository]


@pytest.fixture
def make(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Make:
    def make(*, replica: bool = True, generations: int = 2) -> Repository:
        made = Repository(tmp_path / "durable", tmp_path / "stage", tmp_path / "replica", capsys)
        tiers: dict[str, Any] = {"stage": {"url": made.stage, "keep": 9}}
        with ckptfmt.open(made.root, **tiers) as repo, repo.checkpointer(RUN) as ckpt:
            for step in range(generations):
                ckpt.save(state(step), step=step)
                ckpt.wait()
            infos = repo.generations(run=RUN, state="committed")
        made.folders = [layout.generation_folder(layout.run_key(RUN), info.key) for info in reversed(infos)]
        if replica:
            assert [
                one["problem"] for one in made.run(str(made.root), "--replica", str(made.replica), "--yes")["copied"]
            ] == [None] * generations
        return made

    return make


# -- lag and catching up -------------------------------------------------------------------------------------
def test_a_replica_gets_everything_and_opens_by_itself(make: Make) -> None:
    here = make()
    for number in range(2):
        here.loads(here.replica, number, catalog="none")
    report = here.run(str(here.root))
    (lag,) = report["lag"]
    assert (lag["role"], lag["generations"], lag["nbytes"], lag["held_id"], lag["newest_id"]) == ("replica", 0, 0, 2, 2)
    shutil.rmtree(here.root)
    here.loads(here.replica, 1, catalog="none")


def test_what_it_lacks_is_shown_and_only_copied_on_demand(make: Make) -> None:
    here = make()
    with ckptfmt.open(here.root) as repo, repo.checkpointer(RUN) as ckpt:
        ckpt.save(state(2), step=2)
    for _ in range(2):
        report = here.run(str(here.root))
        assert report["dry_run"] is True
        assert report["copied"] == []
        (lag,) = report["lag"]
        assert (lag["generations"], lag["held_id"], lag["newest_id"]) == (1, 2, 3)
        assert lag["nbytes"] > CHUNK
        assert lag["seconds"] >= 0
    report = here.run(str(here.root), "--yes")
    (copied,) = report["copied"]
    assert (copied["generation_id"], copied["problem"]) == (3, None)
    assert copied["nbytes"] > CHUNK
    assert report["lag"][0]["generations"] == 0
    assert here.run(str(here.root), "--yes")["copied"] == []
    same(ckptfmt.load(here.replica, run=RUN, catalog="none"), state(2))


def test_it_is_copied_from_a_tier_where_it_is_whole(make: Make) -> None:
    """None has all of it: the second pack is put together from durable tier and stage."""
    here = make(replica=False)
    here.damage(here.root, 0)
    here.damage(here.root, 1)
    here.damage(here.stage, 1, chunk=1)
    here.run(str(here.root), "--replica", str(here.replica), "--yes")
    for number in range(2):
        here.loads(here.replica, number, catalog="none")


def test_what_is_whole_nowhere_is_told_and_the_rest_is_copied(make: Make) -> None:
    here = make(replica=False)
    here.damage(here.root, 0)
    here.damage(here.stage, 0)
    report = here.run(str(here.root), "--replica", str(here.replica), "--yes", code=12)
    assert [(one["generation_id"], one["kind"]) for one in report["copied"]] == [(1, "corrupt"), (2, None)]
    assert report["lag"][0]["generations"] == 1
    here.loads(here.replica, 1, catalog="none")
    assert not (here.folder(here.replica, 0) / layout.COMMIT).exists()


def test_what_is_there_already_is_compared_and_noted(make: Make) -> None:
    """A rebuilt catalog knows of no replica: what they hold is found by comparing it."""
    here = make()
    with ckptfmt.open(here.root) as repo:
        catalog = repo._connection.site.sql()
        (tier,) = [tier.uuid for tier in catalog.tiers() if tier.role == "replica"]
        for number in (1, 2):
            catalog.drop_replicas(number, tier)
    assert here.run(str(here.root))["lag"][0]["generations"] == 2
    before = {path: path.stat().st_mtime_ns for path in here.replica.rglob("*.safetensors")}
    report = here.run(str(here.root), "--yes")
    assert [one["problem"] for one in report["copied"]] == [None, None]
    assert report["lag"][0]["generations"] == 0
    assert {path: path.stat().st_mtime_ns for path in here.replica.rglob("*.safetensors")} == before


def test_a_copy_that_was_killed_is_finished(make: Make) -> None:
    here = make(replica=False)
    here.run(str(here.root), "--replica", str(here.replica), "--yes")
    folder = here.folder(here.replica, 1)
    (folder / layout.COMMIT).unlink()
    for hint in here.replica.glob(f"runs/*/commits/*{folder.name}"):
        hint.unlink()
    torn = here.pack(here.replica, 1)
    torn.write_bytes(torn.read_bytes()[:-1000])
    with ckptfmt.open(here.root) as repo:
        catalog = repo._connection.site.sql()
        (tier,) = [tier.uuid for tier in catalog.tiers() if tier.role == "replica"]
        catalog.drop_replicas(2, tier)
    assert [one["problem"] for one in here.run(str(here.root), "--yes")["copied"]] == [None]
    here.loads(here.replica, 1, catalog="none")


def test_what_a_running_launch_saves_is_left_to_it(make: Make) -> None:
    here = make()
    with ckptfmt.open(here.root) as repo, repo.checkpointer(RUN) as ckpt:
        ckpt.save(state(2), step=2)
        ckpt.wait()
        (copied,) = here.run(str(here.root), "--yes")["copied"]
        assert copied["kind"] == "launch_live"
    assert [one["problem"] for one in here.run(str(here.root), "--yes")["copied"]] == [None]


def test_a_replica_that_is_away_is_told(make: Make) -> None:
    here = make()
    here.replica.rename(here.replica.with_name("elsewhere"))
    for flags in ([], ["--yes"]):
        report = here.run(str(here.root), *flags)
        assert "tier.json" in report["lag"][0]["problem"]
        assert not here.replica.exists()


def test_by_proof_hints_are_compared(make: Make) -> None:
    here = make()
    with ckptfmt.open(here.root) as repo, repo.checkpointer(RUN) as ckpt:
        ckpt.save(state(2), step=2)
    report = here.run(str(here.root), "--catalog", "none", "--replica", str(here.replica))
    assert report["read_by"] == "proof"
    (lag,) = report["lag"]
    assert (lag["generations"], lag["nbytes"], lag["seconds"]) == (1, None, None)
    here.run(str(here.root), "--catalog", "none", "--replica", str(here.replica), "--yes", code=2)


def test_a_retired_generation_is_not_copied(make: Make) -> None:
    here = make(replica=False)
    with ckptfmt.open(here.root) as repo:
        repo._connection.site.sql().retire(1)
    report = here.run(str(here.root), "--replica", str(here.replica), "--yes")
    assert [one["generation_id"] for one in report["copied"]] == [2]


# -- repair -------------------------------------------------------------------------------------------------
def objects(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file() and path.suffix != ".sqlite"}


@pytest.mark.parametrize("where", ["durable", "replica"])
@pytest.mark.parametrize("how", ["damaged", "short", "gone"])
def test_damage_is_repaired_beside_it(make: Make, where: str, how: str) -> None:
    here = make()
    root = {"durable": here.root, "replica": here.replica}[where]
    pack = here.pack(root, 1)
    if how == "damaged":
        here.damage(root, 1)
    elif how == "short":
        pack.write_bytes(pack.read_bytes()[:-1])
    else:
        pack.unlink()
    before = objects(root)

    report = here.run(str(here.root), "--repair")
    (item,) = report["repairs"]
    assert (item["generation_id"], item["role"], item["written"], item["problem"]) == (2, where, None, None)
    assert len(item["sources"]) == 2
    assert objects(root) == before, "a plan changes nothing"

    report = here.run(str(here.root), "--repair", "--yes")
    (item,) = report["repairs"]
    assert item["problem"] is None
    after = objects(root)
    assert {path: after[path] for path in before} == before, "nothing is written over"
    new = sorted(path.name for path in after.keys() - before.keys())
    assert new == [item["written"].rpartition("/")[2], *(name for name in new if name.startswith("repair-"))]

    assert here.run(str(here.root), "--repair")["repairs"] == []
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(here.root), "--json"])
    assert ended.value.code == 0
    here.capsys.readouterr()
    here.loads(root, 1, catalog="none")
    with ckptfmt.open(here.root) as repo:
        records = repo._connection.site.sql().replicas(2)
    assert {record.name for record in records} >= {new[0]}


def test_it_is_put_together_where_no_tier_has_it_whole(make: Make) -> None:
    here = make()
    here.damage(here.root, 1)
    here.damage(here.stage, 1, chunk=1)
    here.damage(here.replica, 1, name="odd")
    report = here.run(str(here.root), "--repair")
    assert [(item["role"], item["sources"]) for item in report["repairs"]] == [
        ("durable", ["pieces"]),
        ("replica", ["pieces"]),
    ]
    here.run(str(here.root), "--repair", "--yes")
    here.loads(here.root, 1, catalog="none")
    here.loads(here.replica, 1, catalog="none")


def test_what_is_whole_nowhere_is_left_as_it_is(make: Make) -> None:
    here = make()
    for root in (here.root, here.stage, here.replica):
        here.damage(root, 1)
    before = objects(here.root)
    for flags in ([], ["--yes"]):
        report = here.run(str(here.root), "--repair", *flags, code=12)
        assert [item["sources"] for item in report["repairs"]] == [[], []]
        assert all("restore an older generation" in item["problem"] for item in report["repairs"])
    assert objects(here.root) == before


def test_a_repair_that_is_damaged_is_repaired_again(make: Make) -> None:
    here = make()
    here.damage(here.root, 1)
    (item,) = here.run(str(here.root), "--repair", "--yes")["repairs"]
    first = here.root / item["written"]
    data = bytearray(first.read_bytes())
    data[-3] ^= 1
    first.write_bytes(data)
    (item,) = here.run(str(here.root), "--repair", "--yes")["repairs"]
    assert item["written"] != str(first.relative_to(here.root))
    assert here.run(str(here.root), "--repair")["repairs"] == []
    here.loads(here.root, 1, catalog="none")


def test_a_repair_that_was_killed_before_it_was_told_is_finished(make: Make) -> None:
    here = make()
    here.damage(here.root, 1)
    orphan = here.folder(here.root, 1) / layout.repaired_pack_name("r00000-p000.safetensors", 1)
    orphan.write_bytes(here.pack(here.replica, 1).read_bytes()[:-9])
    (item,) = here.run(str(here.root), "--repair", "--yes")["repairs"]
    assert item["written"].endswith("-r2.safetensors")
    here.loads(here.root, 1, catalog="none")


def test_all_generations_or_the_latest(make: Make) -> None:
    here = make()
    here.damage(here.root, 0)
    assert here.run(str(here.root), "--repair")["repairs"] == []
    assert [item["generation_id"] for item in here.run(str(here.root), "--repair", "--all")["repairs"]] == [1]
    assert [item["generation_id"] for item in here.run(f"{here.root}#{RUN}@1", "--repair")["repairs"]] == [1]
    here.run(str(here.root), "--all", code=2)


def test_repairs_go_with_their_generation(make: Make) -> None:
    here = make()
    here.damage(here.root, 0)
    here.run(str(here.root), "--repair", "--all", "--yes")
    folder = here.folder(here.root, 0)
    assert list(folder.glob("repair-*"))
    with ckptfmt.open(here.root) as repo:
        site = repo._connection.site
        site.sql().retire(1)
        collect(site, dry_run=False, grace=timedelta(0))  # makes the tombstone
        collect(site, dry_run=False, grace=timedelta(0))
    assert {path.name for path in folder.iterdir()} == {layout.COMMIT, layout.RETIRED}


def test_pages_for_people(make: Make) -> None:
    here = make()
    here.damage(here.root, 1)
    for arguments in ([], ["--yes"], ["--repair"], ["--repair", "--yes"], ["--repair"]):
        with pytest.raises(SystemExit) as ended:
            main(["replicate", str(here.root), *arguments])
        out, err = here.capsys.readouterr()
        assert ended.value.code == 0, err
        assert out
        if arguments == ["--repair"]:
            assert "would write 1 object" in out or "nothing to replicate" in out


def test_catching_up_leaves_damage_of_a_whole_replica_to_a_repair(make: Make) -> None:
    here = make()
    with ckptfmt.open(here.root) as repo:
        catalog = repo._connection.site.sql()
        (tier,) = [tier.uuid for tier in catalog.tiers() if tier.role == "replica"]
        catalog.drop_replicas(1, tier)
    here.damage(here.replica, 0)
    before = objects(here.replica)
    (copied,) = here.run(str(here.root), "--yes", code=12)["copied"]
    assert copied["kind"] == "corrupt"
    assert f"--repair URL#{RUN}@1" in copied["problem"]
    assert objects(here.replica) == before
    here.run(f"{here.root}#{RUN}@1", "--repair", "--yes")
    assert [one["problem"] for one in here.run(str(here.root), "--yes")["copied"]] in ([], [None])
    assert here.run(str(here.root))["lag"][0]["generations"] == 0
