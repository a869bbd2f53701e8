"""Uploads and downloads of the same bytes to one S3 server: saves and a load of ckptfmt, and bare copies by others.

All upload from memory of their own: ckptfmt the packs of a snapshot, from the return of ``save`` to the commit, its
proof included. What taking the snapshot costs training is measured elsewhere, but the time from the call is told, too.
The others move one object from and into memory, and neither hash nor commit. Each runs as its documentation has it,
and obstore without signing the bytes, which only costs it time.
"""

from __future__ import annotations

import io
import time
import urllib.request
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
from benchmarks.turns import Turns
from ckptfmt.backends.s3_options import parse_place
from ckptfmt.backends.s3_store import S3Store
from ckptfmt.measure import states

CONTENDERS: Final = ("ckptfmt", "boto3", "s3fs", "obstore")
_WARM_BYTES: Final = 24 << 20
"""Of what each moves once beforehand: large enough to take the way of large objects."""
_RANGE_BYTES: Final = 8 << 20
_TOUCH_SECONDS: Final = 60.0
_FORGOTTEN_SECONDS: Final = 1.5
"""The server removes the bytes of an object some time after its name."""


@dataclass(frozen=True)
class Timed:
    seconds: float
    cpu: float
    peak: int
    """Bytes that became resident at most."""
    called: float
    """Seconds from the call; others are called with the bytes that they upload."""


def measure_transfer(job: Job) -> dict[str, Any]:
    """``job.count`` times an upload of the same bytes and a download, in turns with the other contenders.

    The first ones meet memory, connections and volumes of the server that nobody has used before. Each download follows
    one that is not measured, and so takes memory that was used a moment ago: some hosts of virtual machines take back
    what has been free for seconds, huge pages first, and what is measured then is how they clear it.
    ``ValueError`` if other bytes come back.
    """
    turns: Turns = job.option("turns")
    with turns:
        return _in_turns(job, turns)


def _in_turns(job: Job, turns: Turns) -> dict[str, Any]:
    state = build(job)
    nbytes = states.state_bytes(state)
    uploads: list[Timed] = []
    downloads: list[Timed] = []
    with _by_ckptfmt(job, state) if job.contender == "ckptfmt" else _by_other(job, state) as moves:
        for number in range(job.count):
            with turns.mine():
                uploads.append(moves.upload(number))
                moves.download(number)
                downloads.append(moves.download(number))
                if nbytes > _WARM_BYTES:
                    _free(job)
    return {"nbytes": nbytes, "upload": list(map(vars, uploads)), "download": list(map(vars, downloads))}


@dataclass(frozen=True)
class Moves:
    """Both are given the number of the turn."""

    upload: Callable[[int], Timed]
    download: Callable[[int], Timed]
    """Of what was uploaded in the same turn."""


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


def _free(job: Job) -> None:
    """Have the server give back the room of what was uploaded: it holds what all upload in its memory."""
    bucket, _, prefix = job.option("root").partition("/")
    store = S3Store(parse_place(f"s3://{bucket}", options(job)["storage_options"]))
    for meta in store.list(prefix):
        if meta.nbytes >= _WARM_BYTES // 2:
            store.delete(meta.key)
    store.close()
    time.sleep(_FORGOTTEN_SECONDS)
    urllib.request.urlopen(job.option("vacuum"), timeout=_TOUCH_SECONDS).close()


# -- ckptfmt ----------------------------------------------------------------------------------------
def options(job: Job) -> dict[str, Any]:
    """What leads to the job's place on the server, for ``ckptfmt.open`` and ``ckptfmt.load``."""
    return {
        "catalog": f"sqlite:///{job.folder.absolute()}/catalog.sqlite",
        "storage_options": {name: job.option(name) for name in ("endpoint", "key", "secret")},
    }


def url(job: Job) -> str:
    return f"s3://{job.option('root')}"


@contextmanager
def _by_ckptfmt(job: Job, state: dict[str, Any]) -> Iterator[Moves]:
    """Saves, and loads into fresh memory, verified."""
    digest = states.state_digest(state)
    with ckptfmt.open(url(job), **options(job)) as repo:
        with repo.checkpointer("warm") as checkpointer:
            checkpointer.save(states.train_state(_WARM_BYTES), step=0).wait()
        ckptfmt.load(url(job), run="warm", **options(job))
        with repo.checkpointer(RUN) as checkpointer:
            resident = _start()
            checkpointer.prepare(state)  # as a job does when it starts
            _touched(resident, states.state_bytes(state))
            pending: list[ckptfmt.PendingSave] = []

            def upload(number: int) -> Timed:
                meter.reset_peak()
                return _timed(
                    lambda: pending[-1].wait(),
                    lambda: pending.append(checkpointer.save(state, step=number)),
                    resident=resident,
                )

            def download(number: int) -> Timed:
                loaded: list[dict[str, Any]] = []
                timed = _timed(
                    lambda: loaded.append(ckptfmt.load(url(job), run=RUN, **options(job))), resident=_start()
                )
                if states.state_digest(loaded[0]) != digest:
                    raise ValueError("ckptfmt: the load gave other bytes than were saved")
                return timed

            yield Moves(upload, download)


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


@contextmanager
def _by_other(job: Job, state: dict[str, Any]) -> Iterator[Moves]:
    payload = b"".join(states.flat_bytes(tensor) for _, tensor in states.named_tensors(state))
    state.clear()
    with _MOVERS[job.contender](job) as mover:
        mover.upload("warm", payload[:_WARM_BYTES])
        mover.download("warm", min(len(payload), _WARM_BYTES))

        def upload(number: int) -> Timed:
            return _timed(lambda: mover.upload(f"object{number}", payload), resident=_start())

        def download(number: int) -> Timed:
            found: list[Any] = []
            timed = _timed(lambda: found.extend(mover.download(f"object{number}", len(payload))), resident=_start())
            digest = xxhash.xxh3_128()
            for piece in found:
                digest.update(piece)
            if digest.digest() != xxhash.xxh3_128_digest(payload):
                raise ValueError(f"{job.contender}: the download gave other bytes than were uploaded")
            return timed

        yield Moves(upload, download)


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
