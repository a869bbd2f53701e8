"""``verify`` reads what every tier holds, and calls nothing damaged that readers find whole in its place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reading_rig import Places, blank, places, repair, same

import ckptfmt
from ckptfmt.backends.posix import PosixBackend
from ckptfmt.cli.main import main
from ckptfmt.errors import Corrupt, Unavailable
from ckptfmt.testing.faults import Fault, FaultyBackend


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Places]:
    made = places(tmp_path)
    yield made
    made.close()


def test_every_tier_is_read(here: Places) -> None:
    report = here.generation().verify()
    assert report.ok
    assert [(tier.role, tier.packs, tier.absent) for tier in report.tiers] == [
        ("durable", 1, 0),
        ("stage", 1, 0),
        ("replica", 1, 0),
    ]
    nbytes = sum(value.nbytes for value in here.saved.values())
    assert [tier.nbytes for tier in report.tiers] == [nbytes] * 3
    assert report.nbytes == 3 * nbytes


def test_damage_names_its_tier(here: Places) -> None:
    assert here.stage is not None
    here.damage(here.stage, "small")
    here.damage(here.replicas[0], "big", 1)
    report = here.generation().verify()
    assert not report.ok
    assert [(problem.tier, problem.tensor, problem.offset) for problem in report.problems] == [
        (PosixBackend(here.stage).url, "small", here.offset_of("small")),
        (PosixBackend(here.replicas[0]).url, "big", here.offset_of("big", 1)),
    ]
    assert [tier.problems for tier in report.tiers] == [0, 1, 1]


def test_what_a_stage_or_replica_lacks_is_no_damage(here: Places) -> None:
    assert here.stage is not None
    here.pack(here.stage).unlink()
    here.pack(here.replicas[0]).unlink()
    report = here.generation().verify()
    assert report.ok
    assert [(tier.packs, tier.absent) for tier in report.tiers] == [(1, 0), (0, 1), (0, 1)]


def test_what_the_durable_tier_lacks_is_damage(here: Places) -> None:
    here.pack(here.durable).unlink()
    report = here.generation().verify()
    assert not report.ok
    assert {problem.tier for problem in report.problems} == {PosixBackend(here.durable).url}


@pytest.mark.parametrize("gone", [False, True])
def test_what_is_repaired_is_whole(here: Places, gone: bool) -> None:
    pack = here.pack(here.durable)
    if not gone:
        here.damage(here.durable, "big", 2)
    repair(here, here.durable, here.replicas[0])
    if gone:
        pack.unlink()
    report = here.generation().verify()
    assert report.ok
    assert report.tiers[0].repaired == 1
    assert {problem.object.rpartition("/")[2] for problem in report.repaired} == {pack.name}


def test_a_repair_that_is_damaged_itself_is_told(here: Places) -> None:
    here.damage(here.durable, "big", 2)
    new = repair(here, here.durable, here.durable)
    report = here.generation().verify()
    assert {problem.object.rpartition("/")[2] for problem in report.problems} == {here.saved_as, new.name}
    assert report.repaired == ()


def test_a_tier_that_is_away_is_told(here: Places) -> None:
    def away(plain: Any) -> FaultyBackend:
        return FaultyBackend(
            plain,
            Fault("read_into", error=lambda: Unavailable("away"), times=None),
            Fault("head", error=lambda: Unavailable("away"), times=None),
        )

    here.wrapped[here.replicas[0]] = away
    report = here.generation().verify()
    assert {(problem.kind, problem.tier) for problem in report.problems} == {
        ("unavailable", PosixBackend(here.replicas[0]).url)
    }


def test_a_restore_through_a_window_asks_whether_all_can_be_read_and_not_whether_no_tier_is_damaged(
    here: Places,
) -> None:
    assert here.stage is not None
    here.damage(here.stage, "big", 0)
    here.damage(here.durable, "big", 1)
    generation = here.generation()
    assert not generation.verify().ok
    generation.require_readable()
    generation.restore(live := blank(), atomic=False)
    same(live, here.saved)
    for root in (here.stage, here.replicas[0]):
        here.damage(root, "big", 1)
    with pytest.raises(Corrupt, match="big"):
        here.generation().require_readable()


# -- the command line ---------------------------------------------------------------------------------------
@pytest.fixture
def tiered(tmp_path: Path) -> tuple[Path, dict[str, Path]]:
    """A repository whose catalog knows a stage and a replica."""
    root, stage, replica = tmp_path / "durable", tmp_path / "stage", tmp_path / "replica"
    with ckptfmt.open(root, stage=stage, replicas=[replica]) as repo, repo.checkpointer("r") as ckpt:
        ckpt.save({"a": np.arange(2000)}, step=1)
    return root, {"stage": stage, "replica": replica}


def _verify(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    with pytest.raises(SystemExit) as ended:
        main(["verify", *arguments, "--json"])
    return int(ended.value.code or 0), json.loads(capsys.readouterr().out)


def test_tiers_that_the_catalog_knows_are_verified(
    tiered: tuple[Path, dict[str, Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    root, places = tiered
    code, report = _verify(capsys, str(root))
    assert code == 0
    (generation,) = report["generations"]
    assert [tier["role"] for tier in generation["tiers"]] == ["durable", "stage", "replica"]
    (pack,) = places["stage"].rglob("*.safetensors")
    data = bytearray(pack.read_bytes())
    data[-5] ^= 1
    pack.write_bytes(data)
    code, report = _verify(capsys, str(root))
    assert code == 12
    assert [problem["tier"] for problem in report["generations"][0]["problems"]] == [generation["tiers"][1]["url"]]


def test_a_place_that_is_no_tier_is_refused(
    tiered: tuple[Path, dict[str, Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, _ = tiered
    (tmp_path / "other").mkdir()
    for flag in ("--stage", "--replica"):
        code, report = _verify(capsys, str(root), flag, str(tmp_path / "other"))
        assert code == 2, report
