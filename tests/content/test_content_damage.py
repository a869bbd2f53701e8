"""Damage of every kind of object: an error that names it, never zeros, never another answer."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from content_fixtures import (
    Damage,
    data_start,
    delete,
    empty,
    exact,
    extend,
    flip,
    folder,
    manifest,
    packs,
    truncate,
    zero,
)

import ckptfmt
from ckptfmt import connect
from ckptfmt.engine.protocol import check_packs
from ckptfmt.errors import BackendError, Conflict, FormatError, InvalidInput
from ckptfmt.repository import Repository
from ckptfmt.testing.faults import Fault, FaultyBackend

CHUNK = 8 << 20


def state(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "big": rng.integers(1, 255, CHUNK + 4096 * 10, np.uint8),
        "small": rng.random(64),
        "zeros": np.zeros(500, np.int8),
        "last": rng.integers(1, 9, 7, np.int8),
    }


def blank() -> dict[str, Any]:
    """Memory for a state."""
    return {
        "big": np.full(CHUNK + 4096 * 10, 7, np.uint8),
        "small": np.ones(64),
        "zeros": np.ones(500, np.int8),
        "last": np.ones(7, np.int8),
    }


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two generations of one shape, so that their packs have one length."""
    place: Path = tmp_path_factory.mktemp("damage") / "repo"
    with ckptfmt.open(place) as repository, repository.checkpointer() as checkpointer:
        for number in (1, 2):
            checkpointer.save(state(number), step=number)
    return place


@pytest.fixture
def place(original: Path, tmp_path: Path) -> Path:
    shutil.copytree(original, tmp_path / "repo")
    return tmp_path / "repo"


def opened(place: Path, number: int = 2, **options: Any) -> ckptfmt.Generation:
    with ckptfmt.open(place, mode="r", **options) as repository:
        return repository.generation(number)


READS: dict[str, Callable[[Path], Any]] = {
    "load": ckptfmt.load,
    "restore": lambda place: ckptfmt.restore(blank(), place),
    "restore-window": lambda place: ckptfmt.restore(blank(), place, atomic=False),
    "read": lambda place: [tensor.read() for tensor in opened(place).values()],
    "by-proof": lambda place: ckptfmt.load(place, catalog="none"),
    "copied-folder": lambda place: ckptfmt.load(folder_of_latest(place)),
}


def folder_of_latest(place: Path) -> Path:
    (found,) = [path.parent for path in place.rglob("COMMIT.json") if '"step":2' in path.read_text()]
    return found


# -- pack data --------------------------------------------------------------------------------------------
def swap_chunks(pack: Path, start: int) -> None:
    data = bytearray(pack.read_bytes())
    data[start : start + 4096], data[start + 4096 : start + 8192] = (
        data[start + 4096 : start + 8192],
        data[start : start + 4096],
    )
    pack.write_bytes(data)


def entry_offset(generation: ckptfmt.Generation, name: str) -> int:
    (box,) = generation._opened.tensor(name).boxes
    return box.offset


IN_DATA: dict[str, tuple[str, Callable[[Path, int, int], None]]] = {
    "first byte": ("big", lambda pack, at, n: flip(pack, at)),
    "last byte of the first chunk": ("big", lambda pack, at, n: flip(pack, at + CHUNK - 1)),
    "second chunk": ("big", lambda pack, at, n: flip(pack, at + CHUNK)),
    "last byte of the file": ("last", lambda pack, at, n: flip(pack, -1)),
    "zeroed": ("small", lambda pack, at, n: zero(pack, at, n)),
    "zeroed page": ("big", lambda pack, at, n: zero(pack, at + 4096, 4096)),
    "pages swapped": ("big", lambda pack, at, n: swap_chunks(pack, at)),
    "one bit of an all-zero tensor": ("zeros", lambda pack, at, n: flip(pack, at + n // 2)),
}


@pytest.mark.parametrize("case", IN_DATA)
def test_fr103_damaged_bytes_of_right_length_are_named(place: Path, case: str) -> None:
    tensor, damage = IN_DATA[case]
    generation = opened(place)
    (pack,) = packs(generation)
    at = entry_offset(generation, tensor)
    damage(pack, at, generation[tensor].nbytes)
    key = f"{generation.url.removeprefix(f'file://{place}/')}/{pack.name}"
    for name, read in READS.items():
        with pytest.raises(ckptfmt.Corrupt) as caught:
            read(place)
        assert caught.value.tensor == tensor, name
        assert (caught.value.object or "").rpartition("/")[2] == pack.name, name
        if name != "copied-folder":
            assert caught.value.object == key
        assert caught.value.offset in (at, at + CHUNK), name
        assert f"tensor {tensor!r}" in str(caught.value), name
        assert "ckptfmt verify" in str(caught.value), name
    report = generation.verify()
    assert not report.ok
    assert [(p.kind, p.object, p.tensor) for p in report.problems] == [("corrupt", key, tensor)]
    others = set(generation) - {tensor}
    assert exact({name: generation[name].read() for name in others}) == exact({name: state(2)[name] for name in others})


def test_slices_touch_only_their_own_chunks(place: Path) -> None:
    generation = opened(place)
    (pack,) = packs(generation)
    flip(pack, entry_offset(generation, "big") + CHUNK + 3)
    assert np.array_equal(generation["big"][:CHUNK], state(2)["big"][:CHUNK])
    with pytest.raises(ckptfmt.Corrupt) as caught:
        generation["big"][CHUNK - 1 : CHUNK + 1]
    assert caught.value.offset == entry_offset(generation, "big") + CHUNK


def test_unverified_bytes_are_handed_out_only_when_asked_for(place: Path) -> None:
    generation = opened(place)
    (pack,) = packs(generation)
    flip(pack, entry_offset(generation, "small"))
    assert not np.array_equal(ckptfmt.load(place, verify=False)["small"], state(2)["small"])
    assert not np.array_equal(generation["small"].read(verify=False), state(2)["small"])
    with pytest.raises(ckptfmt.Corrupt):
        np.asarray(generation["small"])


def test_verify_lists_all_damage_not_the_first(place: Path) -> None:
    generation = opened(place)
    (pack,) = packs(generation)
    for tensor, inner in [("big", 0), ("big", CHUNK), ("small", 0), ("last", 0)]:
        flip(pack, entry_offset(generation, tensor) + inner)
    flip(pack, 10)
    seen: list[tuple[int, int]] = []
    report = generation.verify(lambda done, total: seen.append((done, total)))
    assert [(p.tensor, p.offset) for p in report.problems] == sorted(
        [
            (None, 0),
            ("big", entry_offset(generation, "big")),
            ("big", entry_offset(generation, "big") + CHUNK),
            ("small", entry_offset(generation, "small")),
            ("last", entry_offset(generation, "last")),
        ],
        key=lambda pair: pair[1] or 0,
    )
    assert (report.chunks, report.nbytes, report.generation_id) == (5, generation.nbytes, 2)
    assert max(seen) == (generation.nbytes, generation.nbytes)
    assert opened(place, 1).verify().ok


def test_a_damaged_pack_header_is_found_by_verify_and_harms_no_reader(place: Path) -> None:
    """Offsets stand in the manifest, so readers need no header; other tools do, so verify looks at it."""
    generation = opened(place)
    (pack,) = packs(generation)
    for offset in (0, 20, data_start(pack) - 1):
        flip(pack, offset)
        (problem,) = generation.verify().problems
        assert (problem.kind, problem.offset, problem.tensor) == ("corrupt", 0, None)
        assert problem.object.endswith(pack.name)
        assert exact(ckptfmt.load(place)) == exact(state(2))
        flip(pack, offset)
    assert generation.verify().ok


# -- whole objects ------------------------------------------------------------------------------------------
def swap_with_the_other_generation(find: Callable[[ckptfmt.Generation], Path]) -> Callable[[Path], None]:
    def swap(place: Path) -> None:
        one, other = find(opened(place, 1)), find(opened(place, 2))
        first, second = one.read_bytes(), other.read_bytes()
        one.write_bytes(second)
        other.write_bytes(first)

    return swap


def pack_of(generation: ckptfmt.Generation) -> Path:
    return packs(generation)[0]


def commit_of(generation: ckptfmt.Generation) -> Path:
    return folder(generation) / "COMMIT.json"


def one(find: Callable[[ckptfmt.Generation], Path], damage: Damage) -> Callable[[Path], None]:
    return lambda place: damage(find(opened(place)))


WHOLE: dict[str, tuple[Callable[[Path], None], type[ckptfmt.CkptError], str]] = {
    "pack truncated": (one(pack_of, truncate), ckptfmt.Corrupt, ".safetensors"),
    "pack extended": (one(pack_of, extend), ckptfmt.Corrupt, ".safetensors"),
    "pack emptied": (one(pack_of, empty), ckptfmt.Corrupt, ".safetensors"),
    "pack deleted": (one(pack_of, delete), ckptfmt.NotFound, ".safetensors"),
    "packs swapped": (swap_with_the_other_generation(pack_of), ckptfmt.Corrupt, ".safetensors"),
    "manifest flipped": (one(manifest, lambda path: flip(path, 30)), ckptfmt.Corrupt, "manifest-"),
    "manifest truncated": (one(manifest, truncate), ckptfmt.Corrupt, "manifest-"),
    "manifest extended": (one(manifest, extend), ckptfmt.Corrupt, "manifest-"),
    "manifest emptied": (one(manifest, empty), ckptfmt.Corrupt, "manifest-"),
    "manifest zeroed": (one(manifest, lambda path: zero(path, 0, 16)), ckptfmt.Corrupt, "manifest-"),
    "manifest deleted": (one(manifest, delete), ckptfmt.NotFound, "manifest-"),
    "manifests swapped": (swap_with_the_other_generation(manifest), ckptfmt.Corrupt, "manifest-"),
}


@pytest.mark.parametrize("case", WHOLE)
def test_fr102_objects_that_are_not_as_recorded_are_named(place: Path, case: str) -> None:
    damage, error, named = WHOLE[case]
    damage(place)
    for name, read in READS.items():
        with pytest.raises(error) as caught:
            read(place)
        assert named in str(caught.value), name
        assert type(caught.value) is error, name
        if isinstance(caught.value, ckptfmt.Corrupt):
            assert named in (caught.value.object or ""), name
    if "swapped" not in case:
        assert exact(opened(place, 1).load()) == exact(state(1)), "the other generation is as it was"


@pytest.mark.parametrize("damage", [truncate, extend, empty, delete, lambda p: flip(p, 20), lambda p: flip(p, -20)])
def test_a_damaged_verdict_proves_nothing(place: Path, damage: Damage) -> None:
    """By proof it is the only word there is; with the catalog nobody needs it."""
    copied = folder_of_latest(place)
    damage(commit_of(opened(place)))
    assert exact(ckptfmt.load(place)) == exact(state(2))
    with pytest.raises((FormatError, ckptfmt.NotFound), match=r"COMMIT\.json|no ckptfmt repository"):
        ckptfmt.load(copied)
    if damage is delete:
        with ckptfmt.open(place, mode="r", catalog="none") as repository:
            assert repository.latest().step == 1, "a hint that nothing proves is skipped"
    else:
        with pytest.raises(FormatError, match=r"COMMIT\.json"):
            ckptfmt.load(place, catalog="none")
    with pytest.raises(ckptfmt.CkptError):
        opened(place, 2, catalog="none")


def test_swapped_verdicts_are_noticed(place: Path) -> None:
    swap_with_the_other_generation(commit_of)(place)
    with pytest.raises(ckptfmt.Corrupt, match=r"COMMIT\.json"):
        ckptfmt.load(place, catalog="none")


@pytest.mark.parametrize("damage", [truncate, empty, lambda p: flip(p, 30)])
def test_a_damaged_marker_is_no_absent_repository(place: Path, damage: Damage) -> None:
    damage(place / "ckptfmt.json")
    with pytest.raises(FormatError, match=r"ckptfmt\.json"):
        ckptfmt.load(place)
    with pytest.raises(FormatError, match=r"ckptfmt\.json"):
        ckptfmt.open(place)


def test_a_lost_catalog_is_not_an_empty_repository(place: Path) -> None:
    (place / "catalog.sqlite").unlink()
    for mode in ("r", "w"):
        with pytest.raises(ckptfmt.CatalogError, match=r"catalog\.sqlite is gone"):
            ckptfmt.open(place, mode=mode)  # type: ignore[arg-type]
    assert exact(ckptfmt.load(place, catalog="none")) == exact(state(2))


# -- while it is being read -----------------------------------------------------------------------------------
@pytest.mark.parametrize("damage", ["os.truncate(pack, size - 1)", "os.truncate(pack, 0)", "os.unlink(pack)"])
def test_fr108_damage_after_opening_is_an_exception_never_a_signal(place: Path, damage: str) -> None:
    code = f"""
import os, sys, ckptfmt
from pathlib import Path
generation = ckptfmt.open(sys.argv[1], mode="r").latest()
(pack,) = Path(generation.url.removeprefix("file://")).glob("*.safetensors")
size = pack.stat().st_size
{damage}
errors = []
last = generation["last"]
for read in (generation.load, last.read, lambda: last[-1:], lambda: generation.restore({{}})):
    try:
        read()
    except (ckptfmt.Corrupt, ckptfmt.NotFound) as error:
        assert ".safetensors" in str(error), error
        errors.append(error)
assert len(errors) == 4, errors
assert not generation.verify().ok
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code, str(place)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_fr102_unavailable_is_neither_absent_nor_corrupt_nor_zeros(place: Path) -> None:
    connection = connect.open_site(place, mode="r", catalog=None, storage_options=None)
    backend = FaultyBackend(
        connection.site.backend,
        Fault("read_into", error=lambda: ckptfmt.Unavailable("timed out"), timing="torn", times=None),
    )
    faulty = dataclasses.replace(connection, site=dataclasses.replace(connection.site, backend=backend))
    live = state(9)
    with Repository(faulty, "r") as repository:
        generation = repository.latest()
        for read in (generation.load, generation["small"].read, lambda: generation.restore(live)):
            with pytest.raises(ckptfmt.Unavailable, match="timed out") as caught:
                read()
            assert caught.value.transient
        assert exact(live) == exact(state(9))
        problems = generation.verify().problems
        assert {problem.kind for problem in problems} == {"unavailable"}
        backend.heal()
        assert exact(generation.load()) == exact(state(2))


def test_fr106_the_classes_of_answers_are_disjoint() -> None:
    leaves = [
        ckptfmt.Corrupt,
        ckptfmt.Unverifiable,
        ckptfmt.NotCommitted,
        ckptfmt.Unavailable,
        ckptfmt.AccessDenied,
        ckptfmt.OutOfSpace,
        ckptfmt.Mismatch,
        ckptfmt.Fenced,
    ]
    for kind in leaves:
        assert [other for other in leaves if issubclass(kind, other)] == [kind]
    roots = (FormatError, ckptfmt.NotFound, BackendError, InvalidInput, Conflict)
    for kind in leaves:
        assert sum(issubclass(kind, root) for root in roots) == 1


def test_every_pack_that_is_gone_or_short_is_named(tmp_path: Path) -> None:
    """One look tells the whole extent of a loss, not only the first object."""
    ckptfmt.save({"a": np.arange(4000.0), "b": np.arange(10)}, tmp_path)
    opened = ckptfmt.open(tmp_path, mode="r").latest()._opened
    (row,) = opened.manifest.packs
    opened.manifest.packs += [msgspec.structs.replace(row, name=name) for name in ("gone-1.st", "gone-2.st")]
    with pytest.raises(ckptfmt.NotFound, match=r"gone-1\.st of generation 1 .*also damaged or gone: \S*/gone-2\.st$"):
        check_packs(opened.site, opened.folder, opened.manifest)
