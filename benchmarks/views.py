"""Views of a generation beside the raw limits of the same files.

    python -m benchmarks.views [--folder DIR] [--bytes N] [--rounds N]

One tensor of 256 MiB, read whole through Zarr from a local pack in the page cache, and the same bytes by one ``preadv``
into memory that nobody has touched; a group of 1,000 arrays opened. The same tensor read whole by TensorStore, from a
Zarr v3 directory that it has written itself, and through each of our faces. In turns; ratios are of the best of all
rounds, as others may be using the machine.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np

import ckptfmt
from benchmarks.columns import aligned

READ_AT_MOST = 0.6
OPEN_AT_MOST_SECONDS = 0.020
TENSORSTORE_AT_LEAST = 0.9
PLAIN = "TensorStore, its own zarr3 directory"


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def whole_reads(folder: Path, nbytes: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each way to read one tensor whole, way by way in every round."""
    rows = nbytes // (4096 * 4)
    values = np.random.default_rng(0).standard_normal((rows, 4096), np.float32)
    generation = ckptfmt.save({"w": values}, folder / "large")
    box = generation._opened.stored.find("w", None).boxes[0]
    path = folder / "large" / box.pack

    def preadv(buffer: object) -> float:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            return timed(lambda: os.preadv(descriptor, [buffer], box.offset))  # type: ignore[list-item]
        finally:
            os.close(descriptor)

    again = generation.zarr_group(mmap=True)["w"]
    ways: dict[str, Callable[[], float]] = {
        "preadv into fresh memory": lambda: preadv(mmap.mmap(-1, box.nbytes)),
        "preadv into fresh huge pages": lambda: preadv(np.empty(box.nbytes, np.uint8)),
        "zarr, mapped, read before": lambda: timed(lambda: again[...]),
        "zarr, mapped, unverified": lambda: _first(generation, mmap=True, verify=False),
        "zarr, mapped, verified": lambda: _first(generation, mmap=True, verify=True),
        "zarr, unverified": lambda: _first(generation, mmap=False, verify=False),
        "zarr (the default)": lambda: _first(generation, mmap=False, verify=True),
        "StoredTensor.read": lambda: timed(lambda: generation["w"].read(framework="numpy")),
    }
    assert np.array_equal(again[...], values)
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            found[name].append(way())
    return found


def _first(generation: ckptfmt.Generation, *, mmap: bool, verify: bool) -> float:
    array = generation.zarr_group(mmap=mmap, verify=verify)["w"]
    return timed(lambda: array[...])


def tensorstore_reads(folder: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds, opening included, to read the tensor of ``whole_reads`` by TensorStore: a plain directory with the same
    chunks, and ours."""
    import tensorstore

    from ckptfmt.exchange.ocdbt_export import export_ocdbt

    with ckptfmt.open(folder / "large", mode="r") as repo:
        generation = repo.latest("default")
    base = export_ocdbt(generation._opened).base
    ours = generation.tensorstore("w")
    values = ours.read().result()
    plain = {"driver": "zarr3", "kvstore": f"file://{folder}/plain/"}
    layout = tensorstore.ChunkLayout(chunk_shape=ours.chunk_layout.read_chunk.shape)
    made = tensorstore.open(plain, create=True, dtype=ours.dtype, shape=ours.shape, chunk_layout=layout).result()
    made.write(values).result()
    index = {"driver": "zarr3", "kvstore": {"driver": "ocdbt", "base": base, "path": "w/"}}

    def read(spec: dict[str, object]) -> object:
        return tensorstore.open(spec, read=True).result().read().result()

    ways: dict[str, Callable[[], object]] = {
        PLAIN: lambda: read(plain),
        "TensorStore, OCDBT over packs": lambda: read(index),
        "tensorstore() mapped, unverified": lambda: _virtual(generation, mmap=True, verify=False),
        "tensorstore() unverified": lambda: _virtual(generation, mmap=False, verify=False),
        "tensorstore() (the default)": lambda: _virtual(generation, mmap=False, verify=True),
    }
    assert np.array_equal(read(index), values)  # type: ignore[arg-type]
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            found[name].append(timed(way))
    return found


def _virtual(generation: ckptfmt.Generation, *, mmap: bool, verify: bool) -> object:
    return generation.tensorstore("w", mmap=mmap, verify=verify).read().result()


def openings(folder: Path, arrays: int, rounds: int) -> dict[str, list[float]]:
    """Seconds to open a group of many arrays from an open generation; and with all of them opened."""
    state = {f"layer.{number}.weight": np.full(8, number) for number in range(arrays)}
    ckptfmt.save(state, folder / "many")
    found: dict[str, list[float]] = {
        f"open a group of {arrays}": [],
        "open it, and one array": [],
        "and all arrays": [],
    }
    for _ in range(rounds):
        with ckptfmt.open(folder / "many", mode="r") as repo:
            opened, one, every = (repo.latest("default") for _ in range(3))
        found[f"open a group of {arrays}"].append(timed(opened.zarr_group))
        found["open it, and one array"].append(timed(lambda one=one: one.zarr_group()["layer.7.weight"]))  # type: ignore[misc]
        found["and all arrays"].append(timed(lambda every=every: dict(every.zarr_group().arrays())))  # type: ignore[misc]
    return found


def table(reads: dict[str, list[float]], by_tensorstore: dict[str, list[float]], opened: dict[str, list[float]]) -> str:
    unit, plain = min(reads["preadv into fresh memory"]), min(by_tensorstore[PLAIN])
    rows = [("", "best", "median", "worst", "time of preadv", "speed of its own")]
    for name, seconds in (reads | by_tensorstore | opened).items():
        figures = (f"{figure(seconds) * 1e3:.1f} ms" for figure in (min, median, max))
        of_preadv = "" if name in opened else f"{min(seconds) / unit:.2f}"
        rows.append((name, *figures, of_preadv, f"{plain / min(seconds):.2f}" if name in by_tensorstore else ""))
    return "\n".join(aligned(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where to save (default: a temporary folder)")
    parser.add_argument("--bytes", type=int, default=256 << 20, dest="nbytes")
    parser.add_argument("--arrays", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write every figure there")
    told = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="ckptfmt-views-", dir=told.folder))
    try:
        reads = whole_reads(folder, told.nbytes, told.rounds)
        by_tensorstore = tensorstore_reads(folder, told.rounds)
        opened = openings(folder, told.arrays, told.rounds)
    finally:
        shutil.rmtree(folder)
    print(table(reads, by_tensorstore, opened))
    print(
        f"goals: a mapped read at most {READ_AT_MOST} of preadv, a group in {OPEN_AT_MOST_SECONDS * 1e3:.0f} ms, "
        f"OCDBT at least {TENSORSTORE_AT_LEAST} of the speed of TensorStore's own directory"
    )
    if told.json is not None:
        told.json.write_text(json.dumps({"reads": reads, "tensorstore": by_tensorstore, "openings": opened}, indent=2))


if __name__ == "__main__":
    main()
