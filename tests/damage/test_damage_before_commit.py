"""Damage between a rank's acknowledgement and the commit: nothing is committed that the rank did not acknowledge."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from damage_kinds import flip_at, swap_files, zero_at

import ckptfmt
from ckptfmt.engine import protocol
from ckptfmt.format import verdict
from ckptfmt.ports.records import GenerationRecord


def state(step: int) -> dict[str, Any]:
    return {"w": np.full(5000, step), "epoch": step}


def part(folder: Path) -> Path:
    return folder / "r00000.part.json"


def pack(folder: Path) -> Path:
    return folder / "r00000-p000.safetensors"


Spoil = Callable[[Path, Path], Any]
PARTS: dict[str, Spoil] = {
    "flip": lambda own, other: flip_at(part(own), 200),
    "truncate": lambda own, other: part(own).write_bytes(part(own).read_bytes()[:-1]),
    "extend": lambda own, other: part(own).write_bytes(part(own).read_bytes() + b"\n"),
    "delete": lambda own, other: part(own).unlink(),
    "zero": lambda own, other: zero_at(part(own), 100, 108),
    "swap": lambda own, other: swap_files(part(own), part(other)),
}
PACKS: dict[str, Spoil] = {
    "truncate": lambda own, other: pack(own).write_bytes(pack(own).read_bytes()[:-1]),
    "extend": lambda own, other: pack(own).write_bytes(pack(own).read_bytes() + b"\0"),
    "delete": lambda own, other: pack(own).unlink(),
}


class Repository:
    """Two generations; the second is damaged after its rank has acknowledged it and before it is merged."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place = place
        ckptfmt.save(state(1), place, step=1)
        self.spoil: Spoil | None = None
        merged = protocol.merged_manifest

        def after_damage(site: Any, row: GenerationRecord, **options: Any) -> Any:
            if self.spoil is not None:
                folder = place / "runs" / row.run_key / row.key
                (other,) = {path.parent for path in place.rglob("manifest-*")} - {folder}
                self.spoil(folder, other)
                self.spoil = None
            return merged(site, row, **options)

        monkeypatch.setattr(protocol, "merged_manifest", after_damage)

    def check_the_first_is_the_latest(self) -> None:
        for catalog in (None, "none"):
            assert ckptfmt.load(self.place, catalog=catalog)["epoch"] == 1
        verdicts = [verdict.decode_commit(path.read_bytes()).verdict for path in self.place.rglob("COMMIT.json")]
        assert sorted(verdicts) == ["aborted", "committed"]
        assert ckptfmt.save(state(3), self.place, step=3).step == 3
        assert ckptfmt.load(self.place)["epoch"] == 3


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    return Repository(tmp_path / "repo", monkeypatch)


@pytest.mark.parametrize("kind", PARTS)
def test_a_part_is_merged_only_as_it_was_acknowledged(repository: Repository, kind: str) -> None:
    def spoil(own: Path, other: Path) -> None:
        kept = part(other).read_bytes()
        PARTS[kind](own, other)
        part(other).write_bytes(kept)

    repository.spoil = spoil
    with pytest.raises(ckptfmt.SaveFailed) as caught:
        ckptfmt.save(state(2), repository.place, step=2)
    cause = caught.value.__cause__
    assert isinstance(cause, ckptfmt.Corrupt | ckptfmt.NotFound)
    assert "r00000.part.json" in str(cause)
    repository.check_the_first_is_the_latest()


@pytest.mark.parametrize("kind", PACKS)
def test_a_pack_of_another_length_is_not_committed(repository: Repository, kind: str) -> None:
    repository.spoil = PACKS[kind]
    with pytest.raises(ckptfmt.SaveFailed) as caught:
        ckptfmt.save(state(2), repository.place, step=2)
    assert "r00000-p000.safetensors" in str(caught.value.__cause__)
    repository.check_the_first_is_the_latest()


def test_fr107_digests_are_those_of_memory_so_what_storage_changed_is_told_from_what_was_saved(
    repository: Repository,
) -> None:
    """A byte that turns before anybody has read it back is found by the first reader, not hashed into the record."""
    repository.spoil = lambda own, other: flip_at(pack(own), -9 + pack(own).stat().st_size)
    saved = ckptfmt.save(state(2), repository.place, step=2)
    with pytest.raises(ckptfmt.Corrupt, match=r"r00000-p000\.safetensors"):
        saved.load()
    assert [problem.tensor for problem in saved.verify().problems] == ["w"]
