"""Views and exports read each chunk from the nearest tier that has it, as restores do (spec/tiers.md, "Reading")."""

from __future__ import annotations

import json
import logging
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reading_rig import CHUNK, Places, Watched, laying, same, state
from reshard_rig import lay_out
from safetensors.numpy import load_file

import ckptfmt
from ckptfmt import connect
from ckptfmt.backends.posix import PosixBackend
from ckptfmt.engine.opened import Opened
from ckptfmt.engine.readlog import Reading as Read
from ckptfmt.engine.readlog import ReadLog
from ckptfmt.errors import Corrupt, InvalidInput
from ckptfmt.exchange.generation_source import every_tensor
from ckptfmt.exchange.kerchunk import export_kerchunk
from ckptfmt.exchange.ocdbt_export import export_ocdbt
from ckptfmt.exchange.safetensors_export import export_safetensors
from ckptfmt.generation import Generation
from ckptfmt.views.opening import Reading, TierPlace, reopened
from ckptfmt.views.zarr_store import GenerationStore

Open = Callable[..., Places]


@pytest.fixture
def laid(tmp_path: Path, quick: None) -> Iterator[Open]:
    with laying(tmp_path) as lay:
        yield lay


# -- every way to read ----------------------------------------------------------------------------------
def _zarr(generation: Generation, folder: Path, **reading: bool) -> dict[str, Any]:
    group = generation.zarr_group(**reading)
    return {name: group[name][...] for name in generation}


def _zarr_mapped(generation: Generation, folder: Path) -> dict[str, Any]:
    return _zarr(generation, folder, mmap=True)


def _tensorstore(generation: Generation, folder: Path, **reading: bool) -> dict[str, Any]:
    return {name: generation.tensorstore(name, **reading).read().result() for name in generation}


def _tensorstore_mapped(generation: Generation, folder: Path) -> dict[str, Any]:
    return _tensorstore(generation, folder, mmap=True)


def _safetensors(generation: Generation, folder: Path) -> dict[str, Any]:
    export_safetensors(generation._opened, folder / "files")
    return load_file(folder / "files" / "model.safetensors")


def _pieces(generation: Generation, folder: Path) -> dict[str, Any]:
    """As ``ckptfmt diff`` reads a generation that it compares with files of others."""
    found = {}
    for name, tensor in every_tensor(generation._opened).items():
        data = b"".join(bytes(piece) for piece in tensor.pieces())
        found[name] = np.frombuffer(data, generation[name].dtype).reshape(tensor.shape)
    return found


WAYS = [_zarr, _zarr_mapped, _tensorstore, _tensorstore_mapped, _safetensors, _pieces]
every_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__.strip("_"))


def _read(generation: Generation) -> Read:
    """What reading it has led to."""
    return generation._opened.nearest.log.since(ReadLog(()).mark())


def _roles(generation: Generation) -> set[str]:
    return {source.role for source in _read(generation).sources}


# -- which tier -----------------------------------------------------------------------------------------
@every_way
def test_what_lies_on_the_stage_is_read_there(laid: Open, way: Any, tmp_path: Path) -> None:
    here = laid()
    watched: list[Watched] = []
    here.wrapped[here.durable] = lambda plain: watched.append(Watched(plain)) or watched[-1]
    generation = here.generation()
    same(way(generation, tmp_path), here.saved)
    assert _roles(generation) == {"stage"}
    assert watched[-1].asked["read_into"] == 0


def _mapped_files() -> set[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if line.endswith(".safetensors")}


def test_the_nearest_local_copy_is_mapped(laid: Open) -> None:
    here = laid()
    assert here.stage is not None
    group = here.generation().zarr_group(mmap=True)
    assert group["small"][0] == here.saved["small"][0]
    assert _mapped_files() & {str(here.pack(here.stage)), str(here.pack(here.durable))} == {str(here.pack(here.stage))}


def test_a_stage_is_mapped_although_the_durable_tier_is_far_away(laid: Open) -> None:
    here = laid(replicas=0)
    here.wrapped[here.durable] = lambda plain: Watched(plain, local=False, distant=True)
    generation = here.generation()
    found = generation.zarr(mmap=True).get_sync("small/c/0")
    assert found is not None
    assert not found.as_numpy_array().flags.owndata
    assert str(here.pack(here.stage)) in _mapped_files()  # type: ignore[arg-type]
    here.pack(here.stage).unlink()  # type: ignore[arg-type]
    generation = here.generation()
    same(_zarr_mapped(generation, here.durable), here.saved)
    assert _roles(generation) == {"durable"}


def test_without_any_local_tier_a_mapping_is_refused(laid: Open) -> None:
    here = laid(stage=False)
    for root in (here.durable, *here.replicas):
        here.wrapped[root] = lambda plain: Watched(plain, local=False)
    with pytest.raises(InvalidInput, match=r"durable, file://.*replica0 is not on a local .*leave out mmap=True"):
        here.generation().zarr(mmap=True)


def test_without_digests_the_nearest_tier_that_can_be_read_is_taken(laid: Open, tmp_path: Path) -> None:
    here = laid()
    assert here.stage is not None
    here.damage(here.stage, "small")
    for mmap in (False, True):
        generation = here.generation()
        shown = _zarr(generation, tmp_path, mmap=mmap, verify=False)
        assert (shown["small"] != here.saved["small"]).sum() == 1
        assert _roles(generation) == {"stage"}
    here.pack(here.stage).unlink()
    for mmap in (False, True):
        same(_zarr(here.generation(), tmp_path, mmap=mmap, verify=False), here.saved)


# -- damage ---------------------------------------------------------------------------------------------
@every_way
def test_a_damaged_chunk_comes_from_another_tier_and_is_told(
    laid: Open, way: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    here = laid()
    assert here.stage is not None
    here.damage(here.stage, "big", 1)
    generation = here.generation(mode="w")
    with caplog.at_level(logging.WARNING, "ckptfmt"):
        same(way(generation, tmp_path), here.saved)
    (problem,) = _read(generation).damaged
    assert (problem.tensor, problem.offset) == ("big", here.offset_of("big", 1))
    assert problem.tier == PosixBackend(here.stage).url
    sources = {source.role: source.nbytes for source in _read(generation).sources}
    assert sources.keys() == {"stage", "durable"}
    assert sources["durable"] == CHUNK, "that chunk alone"
    told = [record.getMessage() for record in caplog.records]
    assert sum("is read from another place" in text for text in told) == 1
    events = generation._opened.site.sql().events(generation_id=generation.id)
    assert [event.detail["tensor"] for event in events if event.kind == "damage"] == ["big"]


@every_way
def test_no_tier_has_all_of_it(laid: Open, way: Any, tmp_path: Path) -> None:
    here = laid()
    assert here.stage is not None
    here.damage(here.stage, "big", 0)
    here.damage(here.stage, "small")
    here.damage(here.durable, "big", 0)
    here.damage(here.durable, "big", 1)
    here.damage(here.replicas[0], "big", 2)
    here.damage(here.replicas[0], "small")
    generation = here.generation()
    same(way(generation, tmp_path), here.saved)
    assert _roles(generation) == {"stage", "durable", "replica"}


@every_way
def test_what_no_tier_has_fails_as_on_the_durable_one(laid: Open, way: Any, tmp_path: Path) -> None:
    here = laid()
    for root in (here.stage, here.durable, *here.replicas):
        assert root is not None
        here.damage(root, "big", 1)
    with pytest.raises(Corrupt, match="tried in vain as well: stage file://") as caught:
        way(here.generation(), tmp_path)
    assert (caught.value.tensor, caught.value.offset) == ("big", here.offset_of("big", 1))


@every_way
@pytest.mark.parametrize("how", ["gone", "short"])
def test_a_stage_that_goes_while_it_is_open(laid: Open, way: Any, tmp_path: Path, how: str) -> None:
    here = laid(replicas=0)
    assert here.stage is not None
    generation = here.generation()
    if how == "gone":
        shutil.rmtree(here.stage)
    else:
        os.truncate(here.pack(here.stage), 100)
    same(way(generation, tmp_path), here.saved)
    assert _roles(generation) == {"durable"}
    kinds = [problem.kind for problem in _read(generation).damaged]
    assert kinds in {"gone": ([],), "short": (["truncated"], ["corrupt"])}[how], "to hold nothing is no damage"


@every_way
@pytest.mark.parametrize("how", ["damaged", "gone", "short"])
def test_a_damaged_durable_tier_with_a_whole_replica(laid: Open, way: Any, tmp_path: Path, how: str) -> None:
    here = laid(stage=False)
    if how == "damaged":
        here.damage(here.durable, "big")
        here.damage(here.durable, "small")
    elif how == "gone":
        here.pack(here.durable).unlink()
    else:
        os.truncate(here.pack(here.durable), 100)
    generation = here.generation()
    same(way(generation, tmp_path), here.saved)
    assert "replica" in _roles(generation)
    (problem,) = _read(generation).damaged
    assert problem.tier == PosixBackend(here.durable).url


def test_a_mapped_copy_that_is_not_as_long_as_it_should_be_is_told(laid: Open) -> None:
    here = laid(stage=False)
    generation = here.generation()
    os.truncate(here.pack(here.durable), 100)
    same(_zarr_mapped(generation, here.durable), here.saved)
    assert str(here.pack(here.replicas[0])) in _mapped_files()
    (problem,) = _read(generation).damaged
    assert (problem.kind, problem.tier) == ("truncated", PosixBackend(here.durable).url)


# -- what strangers are pointed to ------------------------------------------------------------------------
def test_references_name_the_durable_tier(laid: Open, tmp_path: Path) -> None:
    here = laid()
    opened = here.generation()._opened
    export_kerchunk(opened, tmp_path / "refs.json")
    text = (tmp_path / "refs.json").read_text()
    assert str(here.pack(here.durable)) in {value[0].removeprefix("file://") for value in _ranges(text)}
    assert str(here.stage) not in text
    report = export_ocdbt(opened)
    assert all((here.durable / key).exists() for key in report.objects)
    assert report.base == f"{PosixBackend(here.durable).url}/{here.folder}/"


def _ranges(text: str) -> list[Any]:
    return [value for value in json.loads(text)["refs"].values() if isinstance(value, list)]


# -- in other processes -----------------------------------------------------------------------------------
READ_PICKLED = """
import pickle, sys
group = pickle.loads(sys.stdin.buffer.read())
sys.stdout.buffer.write(group["big"][...].tobytes())
"""


@pytest.fixture
def staged(tmp_path: Path, quick: None) -> Iterator[ckptfmt.Repository]:
    with ckptfmt.open(tmp_path / "r", stage=tmp_path / "fast", replicas=[tmp_path / "copy"]) as repo:
        with repo.checkpointer() as checkpointer:
            checkpointer.save(state(), step=1).result()  # type: ignore[union-attr]
        yield repo


def _packs(folder: Path) -> list[Path]:
    found = sorted(folder.rglob("*.safetensors"))
    assert found
    return found


@pytest.mark.parametrize("mmap", [False, True])
def test_a_pickled_store_reads_from_the_tiers_that_are_there(
    staged: ckptfmt.Repository, tmp_path: Path, mmap: bool
) -> None:
    data = pickle.dumps(staged.latest().zarr_group(mmap=mmap))
    for path in _packs(tmp_path / "r"):
        path.unlink()
    expected = state()["big"].tobytes()
    for left in ("stage", "replica"):
        done = subprocess.run([sys.executable, "-c", READ_PICKLED], input=data, capture_output=True)
        assert done.returncode == 0, done.stderr.decode()
        assert done.stdout == expected
        assert (b"is read from another place" in done.stderr) == (left == "replica")
        shutil.rmtree(tmp_path / "fast", ignore_errors=True)


def _reopened(store: GenerationStore, **changed: Any) -> Opened:
    where = {name: store.__getstate__()[name] for name in ("url", "folder", "key", "storage_options", "tiers")}
    return reopened(**where | changed)


def test_the_stage_of_another_host_is_none_here(staged: ckptfmt.Repository) -> None:
    store = staged.latest().zarr()
    tiers = store.__getstate__()["tiers"]
    assert [tier.role for tier in _reopened(store).nearest.tiers] == ["stage", "durable", "replica"]
    elsewhere = [place._replace(host="elsewhere") for place in tiers]
    assert [tier.role for tier in _reopened(store, tiers=elsewhere).nearest.tiers] == ["durable", "replica"]


def test_a_tier_that_cannot_be_opened_there_is_left_out(
    staged: ckptfmt.Repository, caplog: pytest.LogCaptureFixture
) -> None:
    """Its library may not be installed."""
    store = staged.latest().zarr()
    place = TierPlace("1" * 8, "replica", "nosuch://x", {}, None)
    assert [tier.role for tier in _reopened(store, tiers=[place]).nearest.tiers] == ["durable"]
    assert "nothing is read from the replica nosuch://x" in caplog.text


def test_what_was_mapped_is_read_where_nothing_is_local() -> None:
    array = np.arange(100.0)
    opened = lay_out({"w": (array, [((0,), (100,))])}, chunk_bytes=64)
    found = GenerationStore(opened, Reading(mmap=True)).get_sync("w/c/0")
    assert found is not None
    assert found.to_bytes() == array.tobytes()


def test_a_pickled_store_carries_options_and_no_secrets(laid: Open) -> None:
    opened = laid(stage=False, replicas=0).generation()._opened
    options = {"key": "AKIA-SECRET", "secret": "SECRET", "token": "SECRET", "region": "eu-9", "requester_pays": True}
    backend = connect.backend_for("s3://bucket/x?endpoint=https://minio.lan:9000", options)
    store = GenerationStore(replace(opened, site=replace(opened.site, backend=backend)), Reading())
    state = store.__getstate__()
    assert state["url"] == "s3://bucket/x?endpoint=https://minio.lan:9000"
    assert state["storage_options"] == {"region": "eu-9", "requester_pays": True}
    assert b"SECRET" not in pickle.dumps(store)
    again = connect.backend_for(state["url"], state["storage_options"])
    assert (again.url, again.storage_options) == (state["url"], state["storage_options"])
