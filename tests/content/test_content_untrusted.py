"""Bytes from anywhere: nothing is unpickled, and a hostile manifest is refused before it is used (FR-124, 125)."""

from __future__ import annotations

import contextlib
import copy
import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from content_fixtures import folder, manifest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckptfmt
from ckptfmt.errors import FormatError
from ckptfmt.format import verdict
from ckptfmt.format.manifest import manifest_digest

Json = dict[str, Any]


class Copy:
    """A generation's folder whose manifest is replaced; the verdict is made to vouch for it."""

    def __init__(self, generation: ckptfmt.Generation, place: Path) -> None:
        shutil.copytree(folder(generation), place)
        self.place = place
        self.json: Json = json.loads(zstandard.decompress(manifest(generation).read_bytes()))
        self._commit = verdict.decode_commit((place / "COMMIT.json").read_bytes())
        self._name = manifest(generation).name

    def write(self, content: Json | bytes) -> None:
        text = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.write_stored(zstandard.compress(text))

    def write_stored(self, stored: bytes) -> None:
        import msgspec

        (self.place / self._name).write_bytes(stored)
        named = verdict.ManifestRef(name=self._name, digest=manifest_digest(stored), bytes=len(stored))
        commit = msgspec.structs.replace(self._commit, manifest=named)
        (self.place / "COMMIT.json").write_bytes(verdict.encode_commit(commit))


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    place = tmp_path_factory.mktemp("untrusted")
    state = {"w": np.arange(100.0), "b": np.arange(6, dtype=np.int8).reshape(2, 3), "tied": None, "n": 2**80}
    state["tied"] = state["w"]
    return Copy(ckptfmt.save(state, place / "repo", metadata={"a": [1, (2,)]}), place / "copy")


def read_all(place: Path) -> None:
    """Everything that reads: load, restore, slices, metadata, verify."""
    with ckptfmt.open(place, mode="r") as repository:
        generation = repository.latest()
        generation.load()
        assert generation.metadata != generation
        for tensor in generation.values():
            tensor[...]
        assert isinstance(generation.verify().ok, bool)
        generation.restore({}, strict=False)


def set_at(*path: str | int, to: Any) -> Callable[[Json], None]:
    def change(root: Json) -> None:
        here: Any = root
        for step in path[:-1]:
            here = here[step]
        here[path[-1]] = to

    return change


def duplicate_first_row(root: Json) -> None:
    for column in root["tensors"].values():
        column.append(column[0])


RULES: dict[str, Callable[[Json], None]] = {
    "newer version": set_at("version", to=2),
    "unknown read feature": set_at("read_features", to=["compression"]),
    "another object": set_at("object", to="part"),
    "a column too short": lambda m: m["tensors"]["dtype"].pop(),
    "the same tensor twice": duplicate_first_row,
    "unknown dtype": set_at("tensors", "dtype", 0, to="float7"),
    "pickled dtype": set_at("tensors", "dtype", 0, to="cos\nsystem\n(S'true'\ntR."),
    "shape beyond its bytes": set_at("tensors", "shape", 0, to=[10**6]),
    "negative shape": set_at("tensors", "shape", 0, to=[-1]),
    "shape that overflows": set_at("tensors", "shape", 0, to=[2**40, 2**40]),
    "65 dimensions": set_at("tensors", "shape", 0, to=[1] * 65),
    "box outside the tensor": set_at("boxes", "start", 0, to=[5]),
    "box beyond the pack": set_at("boxes", "offset", 0, to=10**9),
    "box in the header": set_at("boxes", "offset", 0, to=0),
    "boxes that overlap": lambda m: set_at("boxes", "offset", 1, to=m["boxes"]["offset"][0])(m),
    "negative offset": set_at("boxes", "offset", 0, to=-8),
    "a digest too few": set_at("boxes", "digests", 0, to=""),
    "a digest that is none": set_at("boxes", "digests", 0, to="zz" * 16),
    "unknown digest": set_at("digest_algorithm", to="md5"),
    "no pack": set_at("boxes", "pack", 0, to=7),
    "path as a pack": set_at("packs", 0, "name", to="../../../etc/passwd"),
    "absolute pack": set_at("packs", 0, "name", to="/etc/passwd"),
    "generation that is a path": set_at("packs", 0, "generation", to="../.."),
    "alias of nothing": set_at("aliases", to={"tied": "nothing"}),
    "alias of itself": set_at("aliases", to={"tied": "tied"}),
    "reference to nothing": set_at("trees", "common", to={"array": "nothing"}),
    "slot of nobody": set_at("trees", "common", to={"per_rank": "nobody"}),
    "two tags": set_at("trees", "common", to={"int": "0x1", "str": "eA=="}),
    "malformed int": set_at("trees", "common", to={"int": "__import__('os')"}),
    "malformed path": set_at("trees", "common", to={"path": ["system", "x"]}),
    "a factory that is code": set_at("trees", "common", to={"defaultdict": ["eval", []]}),
    "a key twice": set_at("trees", "common", to={"dict": [["a", 1], ["a", 2]]}),
    "reference in metadata": set_at("metadata", to={"array": "w"}),
    "too deep": set_at("trees", "common", to=json.loads("[" * 500 + "]" * 500)),
    "chunks of nothing": set_at("chunk_bytes", to=0),
    "another generation's": set_at("key", to="0" * 32),
}


@pytest.mark.parametrize("rule", RULES)
def test_fr125_each_rule_of_the_manifest_is_enforced(hostile: Copy, rule: str) -> None:
    changed = copy.deepcopy(hostile.json)
    RULES[rule](changed)
    assert changed != hostile.json
    hostile.write(changed)
    with pytest.raises(FormatError) as caught:
        read_all(hostile.place)
    assert str(caught.value)


def test_fr125_the_unchanged_manifest_is_read(hostile: Copy) -> None:
    """Else the tests here would prove nothing."""
    hostile.write(hostile.json)
    read_all(hostile.place)


@pytest.mark.parametrize(
    "stored",
    [
        b"\0",
        b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
        zstandard.compress(b"\x80\x04cposix\nsystem\n(S'true'\ntR."),
        zstandard.compress(b"{}"),
        zstandard.compress(b'{"a": NaN}'),
        zstandard.compress(b"[" * 100_000),
        zstandard.compress(bytes(1 << 27)),
        zstandard.compress(b'{"version": 1, "version": 2}'),
    ],
    ids=["zero", "pickle", "pickle-in-zstd", "nothing", "nan", "deep", "bomb", "duplicate"],
)
def test_fr124_what_is_no_manifest_is_refused(hostile: Copy, stored: bytes) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    hostile.write_stored(stored)
    with pytest.raises(FormatError):
        read_all(hostile.place)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10, "KiB: no bomb goes off"


def places(node: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return (
        [path, *(p for key, item in items for p in places(item, (*path, key)))]
        if path
        else [p for key, item in items for p in places(item, (key,))]
    )


VALUES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.sampled_from([0, 1, -1, 2**31, 2**53, 2**62, 2**63, 4096])
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["w", "..", "tensor", "uint8", "float64", "0" * 32])
    | st.just([])
    | st.just({})
    | st.builds(
        lambda tag, item: {tag: item}, st.sampled_from(["array", "int", "set", "path", "dict"]), st.text(max_size=3)
    )
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_fr125_mutations_end_in_a_typed_error_or_in_true_bytes(hostile: Copy, data: st.DataObject) -> None:
    changed = copy.deepcopy(hostile.json)
    for _ in range(data.draw(st.integers(1, 3))):
        spot = data.draw(st.sampled_from(places(changed)))
        if data.draw(st.booleans()):
            set_at(*spot, to=data.draw(VALUES))(changed)
        else:
            here: Any = changed
            for step in spot[:-1]:
                here = here[step]
            del here[spot[-1]]
    hostile.write(json.dumps(changed).encode())
    # NotFound: another pack's name; UnsupportedValue: an unknown tag; Mismatch: nothing is left to restore
    with contextlib.suppress(FormatError, ckptfmt.NotFound, ckptfmt.UnsupportedValue, ckptfmt.Mismatch):
        read_all(hostile.place)


@pytest.mark.slow
def test_fr124_no_pickle_is_read_or_written_by_anything(tmp_path: Path) -> None:
    """An audit hook sees every class that an unpickler looks up, and imports are watched for other serialisers."""
    code = """
import sys
touched = []
sys.addaudithook(lambda event, args: touched.append(args) if event == "pickle.find_class" else None)
import pickle, numpy as np, torch, ckptfmt
model = torch.nn.Linear(2, 2)
state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "rng": ckptfmt.Rng(), "a": np.ones(3)}
del touched[:]  # what importing torch looked up
def refuse(*args, **kwargs):
    raise AssertionError("pickle was called")
for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler", "_Pickler", "_Unpickler"):
    setattr(pickle, name, refuse)
torch.save = torch.load = refuse
generation = ckptfmt.save(state, sys.argv[1], metadata={"d": torch.float32})
ckptfmt.load(sys.argv[1])
ckptfmt.restore(state, sys.argv[1])
with ckptfmt.open(sys.argv[1]) as repository:
    repository.runs(), repository.generations(), repository.latest().verify(), repository.latest().metadata
    repository.recover(), repository.gc()
assert touched == []
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.name != "catalog.sqlite":
            assert path.suffix in (".safetensors", ".json", ".zst", ""), path
