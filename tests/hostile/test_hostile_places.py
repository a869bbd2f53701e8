"""Something else stands in the place of an object or folder: links that lead out, pipes, folders, devices."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

import ckptfmt
from ckptfmt.errors import CkptError
from ckptfmt.format import verdict
from ckptfmt.format.manifest import decode_manifest, encode_sound, manifest_digest, validate

STATE = {"w": np.arange(3000.0), "n": 1}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place: Path = tmp_path_factory.mktemp("places") / "repo"
    with ckptfmt.open(place) as repository, repository.checkpointer() as checkpointer:
        for step in (1, 2):
            checkpointer.save(STATE, step=step)
    return place


@pytest.fixture
def place(original: Path, tmp_path: Path) -> Path:
    shutil.copytree(original, tmp_path / "repo")
    return tmp_path / "repo"


def newest(place: Path) -> Path:
    (found,) = [path.parent for path in place.rglob("COMMIT.json") if '"step":2' in path.read_text()]
    return found


OBJECTS: dict[str, Callable[[Path], Path]] = {
    "marker": lambda place: place / "ckptfmt.json",
    "claim": lambda place: place / "catalogs" / "00000001.json",
    "pack": lambda place: next(newest(place).glob("*.safetensors")),
    "manifest": lambda place: next(newest(place).glob("manifest-*")),
    "COMMIT.json": lambda place: newest(place) / "COMMIT.json",
    "catalogs": lambda place: place / "catalogs",
    "runs": lambda place: place / "runs",
    "run": lambda place: newest(place).parent,
    "generation": newest,
    "commits": lambda place: newest(place).parent / "commits",
}
READS: dict[str, Callable[[Path], object]] = {
    "load": ckptfmt.load,
    "by proof": lambda place: ckptfmt.load(place, catalog="none"),
    "restore": lambda place: ckptfmt.restore({"w": np.zeros(3000), "n": 0}, place, atomic=False),
    "verify": lambda place: ckptfmt.open(place, mode="r").latest().verify(),
    "write": lambda place: ckptfmt.save(STATE, place, step=3),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_links_that_lead_out_of_the_repository_are_not_followed(place: Path, tmp_path: Path, name: str) -> None:
    """Although what they lead to would be sound to the last bit."""
    found = OBJECTS[name](place)
    outside = tmp_path / "outside" / found.name
    outside.parent.mkdir()
    shutil.move(found, outside)
    found.symlink_to(outside)
    before = {path: path.stat().st_mtime_ns for path in outside.parent.rglob("*")}
    refused = 0
    for reading, read in READS.items():
        try:
            read(place)
        except CkptError as error:
            refused += 1
            cause = error.__cause__ if isinstance(error, ckptfmt.SaveFailed) else error
            assert isinstance(cause, ckptfmt.AccessDenied | ckptfmt.NotFound | ckptfmt.FormatError), (reading, cause)
        else:
            # The catalog vouches for the manifest, so that a reader needs neither verdict nor hints nor old claims.
            assert (name, reading) in ALLOWED, f"{name}: {reading} went on"
    assert refused
    assert {path: path.stat().st_mtime_ns for path in outside.parent.rglob("*")} == before, (
        "something was written outside"
    )
    assert not list(outside.parent.rglob("*.part.json")) or name in ("runs", "run", "generation")


ALLOWED = {
    *((name, reading) for name in ("COMMIT.json", "commits") for reading in ("load", "restore", "verify", "write")),
    *((name, "write") for name in ("pack", "manifest", "generation")),
    ("generation", "by proof"),
    ("COMMIT.json", "by proof"),
    ("catalogs", "load"),
    ("catalogs", "by proof"),
    ("catalogs", "restore"),
    ("catalogs", "verify"),
    ("claim", "load"),
    ("claim", "by proof"),
    ("claim", "restore"),
    ("claim", "verify"),
}


@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_what_is_no_file_is_refused_and_never_waited_for(place: Path, kind: str) -> None:
    """A pipe without a writer would hold its reader for ever; a child with a limit shows that it does not."""
    if kind == "device" and os.geteuid() != 0:
        pytest.skip("only root makes devices")
    make = {
        "pipe": "os.mkfifo(path)",
        "folder": "os.mkdir(path)",
        "device": "os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))",
    }[kind]
    targets = [str(OBJECTS[name](place)) for name in ("marker", "claim", "pack", "manifest", "COMMIT.json")]
    code = f"""
import os, stat, sys, ckptfmt
root = sys.argv[1]
for path in sys.argv[2:]:
    kept = path + ".kept"
    os.rename(path, kept)
    {make}
    catalog = "none" if path.endswith("COMMIT.json") else None
    try:
        ckptfmt.load(root, catalog=catalog, at=2)
    except ckptfmt.CkptError as error:
        print(os.path.basename(path), type(error).__name__)
    else:
        assert "catalogs" in path, path
    (os.rmdir if os.path.isdir(path) else os.unlink)(path)
    os.rename(kept, path)
ckptfmt.load(root)
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(place), *targets], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("\n") >= 4, done.stdout


def test_a_pack_of_terabytes_with_nothing_in_it_is_an_error_of_memory(place: Path) -> None:
    """A file with holes can be as long as a manifest claims. What asks for all of it is told that it cannot be had."""
    folder = newest(place)
    (pack,) = folder.glob("*.safetensors")
    (stored,) = folder.glob("manifest-*")
    value, nbytes = decode_manifest(stored.read_bytes()), 1 << 43
    try:
        os.truncate(pack, nbytes)
    except OSError:
        pytest.skip("this file system holds no file of 8 TiB")
    value.packs[0] = msgspec.structs.replace(value.packs[0], nbytes=nbytes)
    rest = nbytes - value.packs[0].header_bytes
    value.tensors.dtype, value.tensors.shape, value.boxes.size = ["uint8"], [(rest,)], [(rest,)]
    value.boxes.digests, value.chunk_bytes = ["0" * 32], 2**62
    data = encode_sound(validate(value))
    stored.write_bytes(data)
    commit = verdict.decode_commit((folder / "COMMIT.json").read_bytes())
    named = verdict.ManifestRef(name=stored.name, digest=manifest_digest(data), bytes=len(data))
    (folder / "COMMIT.json").write_bytes(verdict.encode_commit(msgspec.structs.replace(commit, manifest=named)))
    code = """
import resource, sys, ckptfmt
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
generation = ckptfmt.open(sys.argv[1], mode="r").latest()
for read in (generation.load, lambda: generation["w"][:2], generation.verify):
    try:
        read()
    except ckptfmt.OutOfSpace as error:
        assert error.kind == "host_memory", error
    else:
        raise AssertionError(read)
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(folder)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["../../x", "/etc/passwd", "a/../../b", "..", ".", "", "\x00", "a\nb", "COM\\x"])
def test_no_key_leaves_the_repository(place: Path, name: str) -> None:
    from ckptfmt.backends.posix import PosixBackend

    backend = PosixBackend(place)
    for call in (
        lambda: backend.read(name, limit=9),
        lambda: backend.head(name),
        lambda: backend.create(name, b"x"),
        lambda: backend.delete(name),
        lambda: backend.open_writer(name, 1),
        lambda: backend.read_into(name, 0, memoryview(bytearray(1))),
    ):
        with pytest.raises(ckptfmt.InvalidInput):
            call()
    assert not list(place.parent.glob("x*"))


def test_a_reference_with_a_path_in_it_stays_a_name(place: Path) -> None:
    for reference in (f"{place}#../../x", f"{place}#default@../1", f"{place}#/etc/passwd"):
        with pytest.raises((ckptfmt.NotFound, ckptfmt.InvalidInput)):
            ckptfmt.load(reference)
