"""Uploads and downloads of the same bytes to one S3 server: saves and a load of ckptfmt, and bare copies by others.

All upload from memory of their own: ckptfmt the packs of a snapshot, from the return of ``save`` to the commit, its
proof included. What taking the snapshot costs training is measured elsewhere, but the time from the call is told, too.
The others move one object from and into memory, and neither hash nor commit. Each runs as its documentation has it,
and obstore without signing the bytes, which only costs it time.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import xxhash

import ckptfmt
from benchmarks import meter
from benchmarks.contenders import RUN
from benchmarks.job import Job
from benchmarks.states import build
from ckptfmt.measure import states

CONTENDERS: Final = ("ckptfmt", "boto3", "s3fs", "obstore")
_WARM_BYTES: Final = 24 << 20
"""Of what each moves once beforehand: large enough to take the way of large objects."""
_RANGE_BYTES: Final = 8 << 20
_TOUCH_SECONDS: Final = 60.0


@dataclass(frozen=True)
class Timed:
    seconds: float
    cpu: float
    peak: int
    """Bytes that became resident at most."""
    called: float
    """Seconds from the call; others are called with the bytes that they upload."""


def measure_transfer(job: Job) -> dict[str, Any]:
    """``job.count`` uploads of the same bytes and one download. ``ValueError`` if other bytes come back.

    The first upload meets memory, connections and volumes of the server that nobody has used before.
    """
    state = build(job)
    nbytes = states.state_bytes(state)
    if job.contender == "ckptfmt":
        uploads, download = _by_ckptfmt(job, state)
    else:
        payload = b"".join(states.flat_bytes(tensor) for _, tensor in states.named_tensors(state))
        state.clear()
        uploads, download = _by_other(job, payload)
    return {"nbytes": nbytes, "upload": [vars(each) for each in uploads], "download": [vars(download)]}


def _timed(work: Callable[[], object], before: Callable[[], object] = lambda: None, *, resident: int) -> Timed:
    """``before`` counts for the time from the call alone. ``resident``: bytes that were before all."""
    called = time.perf_counter()
    before()
    cpu, began = meter.cpu_seconds(), time.perf_counter()
    work()
    ended = time.perf_counter()
    return Timed(ended - began, meter.cpu_seconds() - cpu, meter.peak_bytes() - resident, ended - called)


def _start() -> int:
    """Bytes that are resident now, from where on the most of them is looked for."""
    meter.reset_peak()
    return meter.resident_bytes()


# -- ckptfmt ----------------------------------------------------------------------------------------
def options(job: Job) -> dict[str, Any]:
    """What leads to the job's place on the server, for ``ckptfmt.open`` and ``ckptfmt.load``."""
    return {
        "catalog": f"sqlite:///{job.folder.absolute()}/catalog.sqlite",
        "storage_options": {name: job.option(name) for name in ("endpoint", "key", "secret")},
    }


def url(job: Job) -> str:
    return f"s3://{job.option('root')}"


def _by_ckptfmt(job: Job, state: dict[str, Any]) -> tuple[list[Timed], Timed]:
    """Saves, and a load into fresh memory, verified."""
    small = states.train_state(_WARM_BYTES)
    with ckptfmt.open(url(job), **options(job)) as repo:
        with repo.checkpointer("warm") as checkpointer:
            checkpointer.save(small, step=0).wait()
        ckptfmt.load(url(job), run="warm", **options(job))
        with repo.checkpointer(RUN) as checkpointer:
            resident = _start()
            checkpointer.prepare(state)  # as a job does when it starts
            _touched(resident, states.state_bytes(state))
            pending: list[ckptfmt.PendingSave] = []
            uploads = [
                _timed(
                    lambda: pending[-1].wait(),
                    lambda step=step: pending.append(checkpointer.save(state, step=step)),  # type: ignore[misc]
                    resident=resident,
                )
                for step in range(job.count)
            ]
    digest = states.state_digest(state)
    states.clear(state)
    loaded: list[dict[str, Any]] = []
    download = _timed(lambda: loaded.append(ckptfmt.load(url(job), run=RUN, **options(job))), resident=_start())
    if states.state_digest(loaded[0]) != digest:
        raise ValueError("ckptfmt: the load gave other bytes than were saved")
    return uploads, download


def _touched(resident: int, nbytes: int) -> None:
    """Wait until about ``nbytes`` more than ``resident`` are, and no more come: a job trains for longer than that."""
    until = time.monotonic() + _TOUCH_SECONDS
    last = 0
    while (found := meter.resident_bytes() - resident) < nbytes * 0.9 or found > last:
        if time.monotonic() > until:
            raise TimeoutError(f"memory for a first save is not there after {_TOUCH_SECONDS:.0f} s")
        last = found
        time.sleep(0.2)


# -- others -----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Mover:
    upload: Callable[[str, bytes], object]
    download: Callable[[str, int], list[Any]]
    """Of so many bytes; the object in pieces."""


def _by_other(job: Job, payload: bytes) -> tuple[list[Timed], Timed]:
    with _MOVERS[job.contender](job) as mover:
        mover.upload("warm", payload[:_WARM_BYTES])
        mover.download("warm", min(len(payload), _WARM_BYTES))
        resident = _start()
        names = [f"object{number}" for number in range(job.count)]
        uploads = [_timed(lambda: mover.upload(name, payload), resident=resident) for name in names]  # noqa: B023
        found: list[Any] = []
        download = _timed(lambda: found.extend(mover.download(names[-1], len(payload))), resident=_start())
        digest = xxhash.xxh3_128()
        for piece in found:
            digest.update(piece)
    if digest.digest() != xxhash.xxh3_128_digest(payload):
        raise ValueError(f"{job.contender}: the download gave other bytes than were uploaded")
    return uploads, download


@contextmanager
def _boto3(job: Job) -> Iterator[Mover]:
    import boto3

    bucket, _, prefix = job.option("root").partition("/")
    client = boto3.client(
        "s3",
        endpoint_url=job.option("endpoint"),
        aws_access_key_id=job.option("key"),
        aws_secret_access_key=job.option("secret"),
        region_name="us-east-1",
    )

    def download(name: str, nbytes: int) -> list[Any]:
        into = io.BytesIO()
        client.download_fileobj(bucket, f"{prefix}/{name}", into)
        return [into.getbuffer()]

    yield Mover(lambda name, data: client.upload_fileobj(io.BytesIO(data), bucket, f"{prefix}/{name}"), download)
    client.close()


@contextmanager
def _s3fs(job: Job) -> Iterator[Mover]:
    import s3fs

    fs = s3fs.S3FileSystem(
        key=job.option("key"),
        secret=job.option("secret"),
        endpoint_url=job.option("endpoint"),
        skip_instance_cache=True,
        use_listings_cache=False,
    )
    root = job.option("root")

    def download(name: str, nbytes: int) -> list[Any]:
        starts = range(0, nbytes, _RANGE_BYTES)
        stops = [min(start + _RANGE_BYTES, nbytes) for start in starts]
        pieces: list[Any] = fs.cat_ranges([f"{root}/{name}"] * len(stops), [*starts], stops, on_error="raise")
        return pieces

    yield Mover(lambda name, data: fs.pipe_file(f"{root}/{name}", data), download)


@contextmanager
def _obstore(job: Job) -> Iterator[Mover]:
    import obstore
    from obstore.store import S3Store

    bucket, _, prefix = job.option("root").partition("/")
    store = S3Store(
        bucket,
        prefix=prefix,
        endpoint=job.option("endpoint"),
        access_key_id=job.option("key"),
        secret_access_key=job.option("secret"),
        region="us-east-1",
        unsigned_payload=True,
        client_options={"allow_http": True},
    )

    def download(name: str, nbytes: int) -> list[Any]:
        starts = range(0, nbytes, _RANGE_BYTES)
        stops = [min(start + _RANGE_BYTES, nbytes) for start in starts]
        return [*obstore.get_ranges(store, name, starts=[*starts], ends=stops, coalesce=0)]

    yield Mover(lambda name, data: obstore.put(store, name, data), download)


_MOVERS: Final = {"boto3": _boto3, "s3fs": _s3fs, "obstore": _obstore}
