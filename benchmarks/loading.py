"""Loads of what each contender saved before: in place and afresh, from a cold and a warm page cache, all compared."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint.state_dict_loader as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import ckptfmt
from benchmarks import meter
from benchmarks.contenders import RUN, SAVERS, State
from benchmarks.job import Job
from benchmarks.states import build, flat
from ckptfmt.measure import states
from ckptfmt.measure.raw_files import drop_cache, fill_cache

WAYS = ("in place, cold", "in place, warm", "afresh, cold", "afresh, warm")


def prepare_saved(job: Job) -> dict[str, Any]:
    """Save the state once with one contender, for ``measure_loads``."""
    state = build(job)
    with SAVERS[job.contender](job.folder, state) as save:
        save(state, 0)()
    name, tensor = sorted(states.named_tensors(state))[len(list(states.named_tensors(state))) // 2]
    one = {"name": name, "digest": states.state_digest({name: tensor})}
    return {"digest": states.state_digest(state), "nbytes": states.state_bytes(state), "one": one}


def measure_loads(job: Job) -> dict[str, Any]:
    """``count`` times each of ``ways``; ``ValueError`` if one gives other bytes than were saved."""
    found: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}
    digest = job.option("digest")
    live = build(job, fill=False)
    states.clear(live)  # its pages are there, as in a live model

    def timed(name: str, load: Callable[[], State]) -> None:
        (drop_cache if name.endswith("cold") else fill_cache)(job.folder)
        used, began = meter.cpu_seconds(), time.perf_counter()
        result = load()
        found.setdefault(name, []).append(time.perf_counter() - began)
        cpu.setdefault(name, []).append(meter.cpu_seconds() - used)
        if states.state_digest(result) != digest:
            raise ValueError(f"{job.contender}, {name}: the load gave other bytes than were saved")

    def filled() -> State:
        IN_PLACE[job.contender](job.folder, live)
        return live

    for _ in range(job.count):
        for way in job.option("ways"):
            if way.startswith("in place"):
                states.clear(live)
                timed(way, filled)
            else:
                timed(way, lambda: AFRESH[job.contender](job.folder))
    return {"seconds": found, "cpu": cpu}


def measure_one_tensor(job: Job) -> dict[str, Any]:
    """One tensor by name from a cold cache: seconds to open and in all, bytes asked of pack files.

    ``ValueError`` if it is not what was saved.
    """
    name = job.option("name")
    drop_cache(job.folder)
    with _counted_reads() as pack_bytes:
        began = time.perf_counter()
        opened, value = ONE_TENSOR_READERS[job.contender](job.folder, name)
        seconds = time.perf_counter() - began
    if states.state_digest({name: value}) != job.option("digest"):
        raise ValueError(f"{job.contender}: tensor {name} has other bytes than were saved")
    return {"open": opened - began, "seconds": seconds, "pack_bytes": sum(pack_bytes), "tensor_bytes": value.nbytes}


@contextmanager
def _counted_reads() -> Iterator[list[int]]:
    """Bytes of each ``preadv`` from a pack: what ckptfmt reads with."""
    found: list[int] = []
    plain = os.preadv

    def counted(descriptor: int, buffers: Any, offset: int, flags: int = 0) -> int:
        count = plain(descriptor, buffers, offset, flags)
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".safetensors"):
            found.append(count)
        return count

    os.preadv = counted
    try:
        yield found
    finally:
        os.preadv = plain


# -- ckptfmt ----------------------------------------------------------------------------------------
def _ckptfmt_in_place(folder: Path, live: State) -> None:
    ckptfmt.restore(live, folder / "repository", run=RUN)


def _ckptfmt_afresh(folder: Path) -> State:
    loaded: State = ckptfmt.load(folder / "repository", run=RUN)
    return loaded


def _ckptfmt_one(folder: Path, name: str) -> tuple[float, torch.Tensor]:
    with ckptfmt.open(folder / "repository", mode="r") as repo:
        opened = time.perf_counter()
        value: torch.Tensor = repo.latest(RUN)[name].read()
    return opened, value


# -- torch.save -------------------------------------------------------------------------------------
def _torch_afresh(folder: Path) -> State:
    loaded: State = torch.load(folder / "0.pt", weights_only=True)
    return loaded


def _torch_in_place(folder: Path, live: State) -> None:
    _copy_into(live, flat(_torch_afresh(folder)))


def _torch_one(folder: Path, name: str) -> tuple[float, torch.Tensor]:
    loaded = flat(_torch_afresh(folder))
    return time.perf_counter(), loaded[name]


# -- safetensors ------------------------------------------------------------------------------------
def _safetensors_in_place(folder: Path, live: State) -> None:
    """The mapped file, copied tensor by tensor: the fastest way that it has, and without any check of the bytes."""
    with safe_open(folder / "0.safetensors", "pt") as file:
        for name, tensor in states.named_tensors(live):
            tensor.copy_(file.get_tensor(name))


def _safetensors_afresh(folder: Path) -> State:
    loaded: State = load_file(folder / "0.safetensors")
    return {name: tensor.clone() for name, tensor in loaded.items()}  # load_file maps: its bytes come when touched


def _safetensors_one(folder: Path, name: str) -> tuple[float, torch.Tensor]:
    with safe_open(folder / "0.safetensors", "pt") as file:
        opened = time.perf_counter()
        value: torch.Tensor = file.get_tensor(name).clone()
    return opened, value


# -- DCP --------------------------------------------------------------------------------------------
def _dcp_in_place(folder: Path, live: State) -> None:
    dcp.load(live, checkpoint_id=folder / "0", no_dist=True)


def _dcp_one(folder: Path, name: str) -> tuple[float, torch.Tensor]:
    reader = FileSystemReader(folder / "0")
    about = reader.read_metadata().state_dict_metadata[name]
    opened = time.perf_counter()
    assert isinstance(about, TensorStorageMetadata)
    wanted = {name: torch.empty(about.size, dtype=about.properties.dtype)}
    dcp.load(wanted, storage_reader=reader, no_dist=True)
    return opened, wanted[name]


def _copy_into(live: State, loaded: State) -> None:
    for name, tensor in states.named_tensors(live):
        tensor.copy_(loaded[name])


IN_PLACE: dict[str, Callable[[Path, State], None]] = {
    "ckptfmt": _ckptfmt_in_place,
    "torch.save": _torch_in_place,
    "safetensors": _safetensors_in_place,
    "DCP save": _dcp_in_place,
}
AFRESH: dict[str, Callable[[Path], State]] = {"ckptfmt": _ckptfmt_afresh, "safetensors": _safetensors_afresh}
"""Of those that a goal compares."""
ONE_TENSOR_READERS = {
    "ckptfmt": _ckptfmt_one,
    "torch.save": _torch_one,
    "safetensors": _safetensors_one,
    "DCP save": _dcp_one,
}
