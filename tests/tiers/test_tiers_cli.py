"""Staged and durable are two moments on the command line, too."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file
from tiers_rig import TieredPlace, of_pack, state_of

import ckptfmt
from ckptfmt.backends.posix import PosixBackend
from ckptfmt.format import layout
from ckptfmt.testing.crash_checks import command_line
from ckptfmt.testing.faults import Fault


def shown(tmp_path: Path, place: TieredPlace, *arguments: str) -> str:
    code, text = command_line(*arguments, "--catalog", place.catalog_url)
    assert code == 0, text
    return text


def test_a_save_under_way(tmp_path: Path, place: TieredPlace) -> None:
    process = place.open()
    held = process.backend.add(Fault("open_writer", hold=threading.Event(), when=of_pack))
    with process.checkpointer() as checkpointer:
        pending = checkpointer.save(state_of(1), step=1)
        assert pending is not None
        assert held.reached.wait(10)
        listed = shown(tmp_path, place, "ls", f"{place.url}#run", "--all")
        assert "#1: 0 of 1 rank durable; 1 staged, 0 B of " in listed
        page = shown(tmp_path, place, "inspect", f"{place.url}#run@1")
        assert "STAGED IN" in page
        assert "0 %" in page
        view = json.loads(shown(tmp_path, place, "inspect", f"{place.url}#run@1", "--json"))
        (rank,) = view["ranks"]
        assert rank["state"] == "staged"
        assert rank["staged_bytes"] > 24_000
        assert view["timings"]["staged"] is not None
        assert view["timings"]["durable"] is None
        assert held.hold is not None
        held.hold.set()
        pending.result(10)
    view = json.loads(shown(tmp_path, place, "inspect", f"{place.url}#run@1", "--json"))
    assert view["timings"]["staged"] <= view["timings"]["durable"]
    assert "staged after" in shown(tmp_path, place, "inspect", f"{place.url}#run@1")
    listed = json.loads(shown(tmp_path, place, "ls", f"{place.url}#run", "--json"))
    assert listed["under_way"] == []


def test_gc_and_recover_find_the_tiers_that_the_catalog_knows(tmp_path: Path) -> None:
    root, stage, copy = tmp_path / "r", tmp_path / "stage", tmp_path / "copy"
    with ckptfmt.open(root, stage=stage, replicas=[copy]) as repository, repository.checkpointer("run") as checkpointer:
        for seed in (1, 2):
            checkpointer.save(state_of(seed), step=seed).result(20)  # type: ignore[union-attr]
        checkpointer.wait()
        site = repository._connection.site
        row = site.sql().generations(run="run")[-1]
        folder = f"runs/{row.run_key}/{row.key}"
        site.tiers.stage.backend.make_folder(folder)  # type: ignore[union-attr]
        site.tiers.stage.backend.create(f"{folder}/{layout.pack_name(0, 7)}", b"x")  # type: ignore[union-attr]
    with ckptfmt.open(root) as repository:
        from ckptfmt.engine.keep import gc

        gc.retire(repository._connection.site, row.id)
    code, text = command_line("gc", str(root), "--yes")
    assert code == 0, text
    assert "on stage" in text
    assert "on replica" in text
    assert layout.RETIRED in {info.key.rpartition("/")[2] for info in PosixBackend(copy).list(folder)}
    code, text = command_line("recover", str(root))
    assert (code, text) == (0, "nothing to recover\n")


def test_an_export_reads_from_the_tiers_that_the_catalog_knows(tmp_path: Path) -> None:
    root, stage, copy = tmp_path / "r", tmp_path / "stage", tmp_path / "copy"
    with ckptfmt.open(root, stage=stage, replicas=[copy]) as repository, repository.checkpointer("run") as checkpointer:
        checkpointer.save(state_of(1), step=1).result(20)  # type: ignore[union-attr]
        checkpointer.wait()
    for place in (root, stage):  # then the replica alone has it
        for pack in place.rglob("*.safetensors"):
            pack.unlink()
        target = tmp_path / f"without-{place.name}"
        code, text = command_line("export", f"{root}#run", "--safetensors", str(target))
        assert code == 0, text
        written = load_file(target / "model.safetensors")
        with ckptfmt.open(copy, mode="r", catalog="none") as replica:
            expected = replica.latest("run")
            assert written.keys() == expected.keys()
            for name, tensor in expected.items():
                np.testing.assert_array_equal(written[name], tensor.read(framework="numpy"))


def test_a_comparison_reads_from_the_tiers_that_the_catalog_knows(tmp_path: Path) -> None:
    root, copy, exported = tmp_path / "r", tmp_path / "copy", tmp_path / "exported"
    with ckptfmt.open(root, replicas=[copy]) as repository, repository.checkpointer("run") as checkpointer:
        for step in (1, 2):
            checkpointer.save(state_of(step), step=step).result(20)  # type: ignore[union-attr]
        checkpointer.wait()
    assert command_line("export", f"{root}#run@1", "--safetensors", str(exported))[0] == 0
    for pack in root.rglob("*.safetensors"):
        pack.unlink()
    for one, differs in ((1, False), (2, True)):
        code, text = command_line("diff", f"{root}#run@{one}", str(exported), "--json")
        assert code == 0, text
        assert ("bytes" in json.loads(text)["counts"]) == differs
    code, text = command_line("diff", f"{root}#run@1", "@2", "--json")
    assert code == 0, text
    assert json.loads(text)["equal"] is False
