"""S3 servers of the tests' own: SeaweedFS, which heeds conditions and is killed at will, and rclone, which does not."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from ckptfmt.backends.object_errors import Failure
from ckptfmt.backends.s3_client import S3Client
from ckptfmt.backends.s3_options import parse_place
from ckptfmt.demo import seaweed
from ckptfmt.demo.postgres import free_port

KEY, SECRET = "AKTEST", "SKTESTSKTEST"
READY_SECONDS = 60.0


def binary(name: str) -> str:
    """A server that came with the environment. Skips where it is not installed, and fails there in CI."""
    found = Path(sys.executable).parent / name
    if found.exists():
        return str(found)
    reason = f"{name} is not installed: pip install -e '.[test]'"
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


class S3Server:
    """A server on a free port of 127.0.0.1 with its files in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._came_up = False
        self._roots = itertools.count()
        self._bucket: str | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def options(self, **more: Any) -> dict[str, Any]:
        """``storage_options`` that lead here."""
        return {"endpoint": self.endpoint, "key": KEY, "secret": SECRET, **more}

    def client(self, bucket: str, **more: Any) -> S3Client:
        """Raw requests, past the backend."""
        return S3Client(parse_place(f"s3://{bucket}", self.options(**more)))

    @property
    def bucket(self) -> str:
        """One for all: SeaweedFS grows several volumes for each."""
        if self._bucket is None:
            self._bucket = "bucket"
            self.client(self._bucket).call("PUT")
        return self._bucket

    def new_root(self) -> str:
        """A place that nobody else has, as ``<bucket>/<prefix>``."""
        return f"{self.bucket}/root{next(self._roots)}"

    @contextmanager
    def own_root(self) -> Iterator[str]:
        """A place in a bucket of its own, which goes with all that is in it."""
        bucket = f"own{next(self._roots)}"
        client = self.client(bucket)
        client.call("PUT")
        try:
            yield f"{bucket}/root"
        finally:
            client.call("DELETE")
            client.close()

    def command(self) -> list[str]:
        raise NotImplementedError

    def pick_ports(self) -> None:
        self.port = free_port()

    def start(self) -> None:
        """Start it, or start it again on the ports that it had, and wait until it answers."""
        if self.port:
            return self._start()
        for left in reversed(range(3)):
            self.pick_ports()
            try:
                return self._start()
            except AssertionError:  # somebody else may have taken a port in between, which ends it
                ended = self._process is not None and self._process.poll() is not None
                self.kill()
                if not left or not ended:
                    raise

    def _start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self.command(),
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                cwd=self.folder,
            )
        until = time.monotonic() + READY_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > until:
                log_text = (self.folder / "log").read_text(errors="replace")[-3000:]
                raise AssertionError(f"{self.command()[0]} does not come up; it said:\n{log_text}")
            time.sleep(0.05)
        self._came_up = True

    def _answers(self) -> bool:
        client = self.client("ready", connect_timeout=1, timeout=5)
        try:
            with suppress(Failure):
                client.call("PUT")  # it is there already
            client.call("PUT", "ready", body=b"1")
        except Failure:
            return False
        return True

    def kill(self) -> None:
        """A crash: all of it ends at once."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process = None


class SeaweedServer(S3Server):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._weed = binary("weed")
        self._ports: dict[str, int] = {}
        seaweed.write_keys(folder, KEY, SECRET)

    def pick_ports(self) -> None:
        self._ports = seaweed.pick_ports()
        self.port = self._ports["s3.port"]

    def command(self) -> list[str]:
        return seaweed.command(self._weed, self._ports)

    @property
    def vacuum(self) -> str:
        """Asked for, room of objects that were removed some seconds ago is free again."""
        return f"http://127.0.0.1:{self._ports['master.port']}/vol/vacuum?garbageThreshold=0.01"

    def kill(self) -> None:
        super().kill()
        if self._came_up:  # else they may be another server's, which has the ports
            seaweed.remove_sockets(self._ports)


class RcloneServer(S3Server):
    """Answers 200 and overwrites under ``If-None-Match: *``, and compares no checksum. A bucket is a folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._rclone = binary("rclone")
        (folder / "buckets").mkdir()

    def command(self) -> list[str]:
        return [
            *(self._rclone, "serve", "s3", str(self.folder / "buckets"), "--addr", f"127.0.0.1:{self.port}"),
            *("--auth-key", f"{KEY},{SECRET}", "--vfs-cache-mode", "off", "--config", "/dev/null"),
        ]


@contextmanager
def s3_server(kind: type[S3Server] = SeaweedServer) -> Iterator[Any]:
    """A running server, gone with its files at the end."""
    folder = Path(tempfile.mkdtemp(prefix="ckptfmt-s3-"))
    try:
        server = kind(folder)
        try:
            server.start()
            yield server
        finally:
            server.kill()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
