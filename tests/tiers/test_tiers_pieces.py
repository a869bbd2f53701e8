"""All tiers together, read as one: every byte was compared, whatever range is asked for."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest

import ckptfmt
from ckptfmt.backends.posix import PosixBackend
from ckptfmt.engine.keep.pieces import Pieces
from ckptfmt.engine.opened import Opened
from ckptfmt.engine.packs import packs_to_copy
from ckptfmt.engine.replicate import Copying, Source
from ckptfmt.engine.tiers import Tier, Tiers
from ckptfmt.errors import Corrupt
from ckptfmt.ports.backend import Backend

MIB = 1 << 20


@pytest.fixture
def opened(tmp_path: Path) -> Opened:
    """Tensors whose chunks begin and end within pages, on a durable tier and a replica, each damaged elsewhere."""
    rng = np.random.default_rng(0)
    state = {name: rng.integers(0, 255, 8 * MIB + extra, np.uint8) for name, extra in (("a", 100), ("b", 201))}
    state |= {f"small{number}": rng.integers(0, 255, number, np.uint8) for number in range(1, 40)}
    saved = ckptfmt.save(state, tmp_path / "durable")._opened
    shutil.copytree(tmp_path / "durable", tmp_path / "replica")
    (name,) = (pack.name for pack in saved.manifest.packs)
    key = f"{saved.folder}/{name}"
    shutil.copy(tmp_path / "durable" / key, tmp_path / "good")
    for root, offsets in (("durable", range(3, 17 * MIB, 3 * MIB)), ("replica", (9,))):
        path = tmp_path / root / key
        data = bytearray(path.read_bytes())
        for at in offsets:
            data[at] ^= 1
        path.write_bytes(data)
    # The header is whole on the stage only, which has no more than the beginning.
    stage = tmp_path / "stage" / key
    stage.parent.mkdir(parents=True)
    stage.write_bytes((tmp_path / "good").read_bytes()[:MIB])
    tiers = Tiers(
        Tier("stage", "stage", PosixBackend(tmp_path / "stage"), "here"),
        (Tier("replica", "replica", PosixBackend(tmp_path / "replica")),),
    )
    return Opened(replace(saved.site, tiers=tiers), saved.folder, saved.info, saved.manifest)


def test_any_range_is_what_was_saved(opened: Opened, tmp_path: Path) -> None:
    good = (tmp_path / "good").read_bytes()
    key = opened.pack_key(opened.manifest.packs[0].name, None)
    pieces, rng = Pieces(opened), np.random.default_rng(1)
    assert pieces.head(key).nbytes == len(good)
    edges = [0, 1, 4096, 8 * MIB + 4096, 8 * MIB + 4196, len(good) - 700, len(good)]
    ranges = [(start, stop) for start in edges for stop in edges if start < stop]
    ranges += [tuple(sorted(rng.integers(0, len(good), 2))) for _ in range(20)]
    for start, stop in ranges:
        buffer = bytearray(stop - start)
        pieces.read_into(key, int(start), memoryview(buffer))
        assert buffer == good[start:stop], (start, stop)


def test_a_pack_is_copied_from_all_of_them(opened: Opened, tmp_path: Path) -> None:
    target = PosixBackend(tmp_path / "target")
    target.create_root()
    target.make_folder(opened.folder)
    packs = packs_to_copy(opened.manifest)
    source = Source(cast(Backend, Pieces(opened)))
    (name,) = Copying([source], target, opened.folder).copy(packs, lambda position, attempt: f"copy{attempt}")
    assert (tmp_path / "target" / opened.folder / name).read_bytes() == (tmp_path / "good").read_bytes()


def test_what_is_whole_nowhere_is_refused(opened: Opened, tmp_path: Path) -> None:
    key = opened.pack_key(opened.manifest.packs[0].name, None)
    at = opened.stored.find("small30", None).boxes[0].offset
    for root in ("durable", "replica"):
        path = tmp_path / root / key
        data = bytearray(path.read_bytes())
        data[at] ^= 4
        path.write_bytes(data)
    with pytest.raises(Corrupt, match="small30"):
        Pieces(opened).read_into(key, at + 3, memoryview(bytearray(2)))
