"""The golden repositories, the script that made them, and the second reader; plus our own way to read them."""

from __future__ import annotations

import importlib.util
import pathlib
from types import ModuleType
from typing import Any

import numpy as np

from ckptfmt.format import checksum, dtypes, layout, tree, verdict
from ckptfmt.format.index import Index
from ckptfmt.format.manifest import decode_manifest, manifest_digest

TESTS = pathlib.Path(__file__).parent.parent
GOLDEN = TESTS / "golden"


def module(path: pathlib.Path) -> ModuleType:
    """Import a file by its path: the tests' folder itself must not come into ``sys.path``."""
    spec = importlib.util.spec_from_file_location(f"golden_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def read_with_ckptfmt(root: pathlib.Path, run: str, *, rank: int = 0) -> tuple[verdict.Commit, Any, dict[str, Any]]:
    """Return (commit, state, {name: array}) of the run's latest proven generation, through ckptfmt.format alone."""
    folder = root / layout.run_folder(layout.run_key(run))
    marker = verdict.decode_marker((root / layout.MARKER).read_bytes())
    hints = [layout.parse_commit_hint(path.name) for path in (folder / "commits").iterdir()]
    for hint in sorted((hint for hint in hints if hint is not None), reverse=True):
        if (folder / hint.key / layout.RETIRED).exists():
            verdict.decode_retired((folder / hint.key / layout.RETIRED).read_bytes())
            continue
        commit = verdict.decode_commit((folder / hint.key / layout.COMMIT).read_bytes())
        assert (commit.verdict, commit.repository, commit.key) == ("committed", marker.repository, hint.key)
        assert commit.manifest is not None
        stored = (folder / hint.key / commit.manifest.name).read_bytes()
        assert manifest_digest(stored) == commit.manifest.digest
        index = Index(decode_manifest(stored))
        arrays = {name: array(index, name, rank, folder / hint.key) for name in [*index, *index.manifest.aliases]}
        return commit, rebuild(index, arrays, rank), arrays
    raise LookupError(run)


def array(index: Index, name: str, rank: int, folder: pathlib.Path) -> np.ndarray[Any, Any]:
    entry = index.entry(index.row(name, rank))
    row = dtypes.dtype(entry.dtype)
    # Raw bytes of one element where numpy has no such type, so that nothing depends on ml_dtypes here.
    whole = np.zeros((*entry.shape, row.itemsize), np.uint8)
    for box in entry.boxes:
        raw = (folder / box.pack.name).read_bytes()[box.offset : box.offset + box.nbytes]
        spans = checksum.chunk_spans(box.nbytes, index.manifest.chunk_bytes)
        assert [checksum.digest(raw[a : a + n]) for a, n in spans] == list(box.digests)
        place = tuple(slice(a, a + n) for a, n in zip(box.start, box.size, strict=True))
        whole[place] = np.frombuffer(raw, np.uint8).reshape(*box.size, row.itemsize)
    return whole


def rebuild(index: Index, arrays: dict[str, Any], rank: int) -> Any:
    trees = index.manifest.trees

    def leaf(tag: str, payload: Any) -> Any:
        if tag == "per_rank":
            return tree.decode(trees.per_rank[str(rank)][payload], leaf, lenient=True)
        name, _ = tree.split_reference(payload)
        value = arrays[name]
        return {"stored_bytes": bytes, "stored_bytearray": bytearray}.get(tag, lambda raw: arrays[name])(
            value.tobytes()
        )

    return tree.decode(trees.common, leaf, lenient=True)
