"""What is compared: each saves a state under a number into a folder, and loads it back.

A save returns what waits until a restart would find a complete copy: file and folder synced, or committed and proven.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict_saver as dcp
from torch.distributed._state_dict_utils import _create_cpu_state_dict
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions

import ckptfmt
from benchmarks.states import flat

State = dict[str, Any]
Save = Callable[[State, int], Callable[[], None]]
"""Begins a save under a number and returns what waits for its end."""

RUN = "bench"


@contextmanager
def by_ckptfmt(folder: Path, state: State) -> Iterator[Save]:
    with ckptfmt.open(folder / "repository") as repo, repo.checkpointer(RUN) as checkpointer:

        def save(state: State, number: int) -> Callable[[], None]:
            pending = checkpointer.save(state, step=number)
            assert pending is not None
            return pending.wait

        yield save


@contextmanager
def by_torch_save(folder: Path, state: State) -> Iterator[Save]:
    def save(state: State, number: int) -> Callable[[], None]:
        with (folder / f"{number}.pt").open("xb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        sync(folder)
        return _done

    yield save


@contextmanager
def by_safetensors(folder: Path, state: State) -> Iterator[Save]:
    from safetensors.torch import save_file

    def save(state: State, number: int) -> Callable[[], None]:
        path = folder / f"{number}.safetensors"
        save_file(flat(state), path)
        sync(path)
        sync(folder)
        return _done

    yield save


@contextmanager
def by_dcp(folder: Path, state: State) -> Iterator[Save]:
    def save(state: State, number: int) -> Callable[[], None]:
        dcp.save(state, checkpoint_id=folder / str(number), no_dist=True)  # its writer syncs each file by default
        return _done

    yield save


@contextmanager
def by_dcp_async(folder: Path, state: State) -> Iterator[Save]:
    with _process_group():

        def save(state: State, number: int) -> Callable[[], None]:
            return _waiting(dcp.async_save(state, checkpoint_id=folder / str(number)))

        yield save


@contextmanager
def by_dcp_cached(folder: Path, state: State) -> Iterator[Save]:
    """With a stager that is kept and so has its copies' memory from the save before."""
    stager = DefaultStager(
        StagingOptions(
            use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
        )  # all of them need a device
    )
    with _process_group():

        def save(state: State, number: int) -> Callable[[], None]:
            return _waiting(dcp.async_save(state, checkpoint_id=folder / str(number), async_stager=stager))

        yield save


@contextmanager
def by_dcp_blocking(folder: Path, state: State) -> Iterator[Save]:
    """With the older stager that copies into a state kept from the save before."""
    stager = BlockingAsyncStager(cache_staged_state_dict=True)
    with _process_group():

        def save(state: State, number: int) -> Callable[[], None]:
            if stager.state_dict_cache is None and not torch.cuda.is_available():
                # It would ask for pinned memory, which torch refuses without a device: give it plain memory.
                stager.state_dict_cache = _create_cpu_state_dict(state)
            return _waiting(dcp.async_save(state, checkpoint_id=folder / str(number), async_stager=stager))

        yield save


@contextmanager
def by_dcp_process(folder: Path, state: State) -> Iterator[Save]:
    with _process_group(), Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 2)  # its process tells of every request there

        def save(state: State, number: int) -> Callable[[], None]:
            kind = dcp.AsyncCheckpointerType.PROCESS
            return _waiting(dcp.async_save(state, checkpoint_id=folder / str(number), async_checkpointer_type=kind))

        yield save


SAVERS = {
    "ckptfmt": by_ckptfmt,
    "torch.save": by_torch_save,
    "safetensors": by_safetensors,
    "DCP save": by_dcp,
    "DCP async": by_dcp_async,
    "DCP async, cached": by_dcp_cached,
    "DCP async, blocking stager": by_dcp_blocking,
    "DCP async, process": by_dcp_process,
}


def sync(path: Path) -> None:
    """fsync a file or folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def forget(folder: Path) -> None:
    """Remove what a contender wrote."""
    shutil.rmtree(folder)
    folder.mkdir()


def _done() -> None:
    """Nothing to wait for: the save was blocking."""


def _waiting(future: Any) -> Callable[[], None]:
    def wait() -> None:
        getattr(future, "upload_completion", future).result()

    return wait


@contextmanager
def _process_group() -> Iterator[None]:
    """async_save asks for a process group even where there is one process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
