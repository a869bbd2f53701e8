"""Repositories that a web server shows: read by proof, and never taken for empty because the server hides something."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fsspec_rig import web_server

import ckptfmt
from ckptfmt.connect import backend_for
from ckptfmt.errors import AccessDenied, BackendError, Corrupt, InvalidInput, NotFound, Unavailable


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository in a local folder, for tests that leave it as it is."""
    root = tmp_path_factory.mktemp("web") / "published"
    for step in (1, 2):
        state = {"model": {"w": np.arange(2_000_000, dtype=np.float32) + step}, "extra": np.zeros(10)}
        ckptfmt.save(state, root, run="llama", step=step)
    return root


def _generation(root: Path) -> str:
    """The latest one's path below the root."""
    hint = sorted(next((root / "runs").iterdir()).joinpath("commits").iterdir())[-1]
    return str(hint.parent.parent.relative_to(root) / hint.name.rsplit("-", 1)[1])


def test_a_web_server_is_read_by_proof(published: Path, tmp_path: Path) -> None:
    log_folder = tmp_path / "log"
    log_folder.mkdir()
    with web_server(published, log_folder) as url:
        loaded = ckptfmt.load(f"{url}#llama", subtree="model")
        assert np.array_equal(loaded["w"], np.arange(2_000_000, dtype=np.float32) + 2)
        assert ckptfmt.load(f"{url}#llama@step:1")["model"]["w"][0] == 1
        with pytest.raises(InvalidInput, match="only read from"):
            ckptfmt.open(url, catalog=f"sqlite:///{tmp_path}/catalog.sqlite")
        with pytest.raises(NotFound):
            backend_for(url).head("absent")


class Web(SimpleHTTPRequestHandler):
    """Python's own, with ranges. The attributes take away what a server may lack."""

    ranges = True
    listing = True
    status = 0
    sent = 0

    def do_GET(self) -> None:
        if self.status:
            return self.send_error(self.status)
        path = self.translate_path(self.path)
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not os.path.isfile(path) or wanted is None or not self.ranges:
            if os.path.isfile(path):
                type(self).sent += os.path.getsize(path)
            return super().do_GET()
        start, last = int(wanted[1]), min(int(wanted[2]), os.path.getsize(path) - 1)
        if start > last:
            return self.send_error(416)
        with open(path, "rb") as file:
            file.seek(start)
            data = file.read(last + 1 - start)
        type(self).sent += len(data)
        self.send_response(206)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Range", f"bytes {start}-{last}/{os.path.getsize(path)}")
        self.end_headers()
        self.wfile.write(data)
        return None

    def do_HEAD(self) -> None:
        if self.status:
            return self.send_error(self.status)
        return super().do_HEAD()

    def list_directory(self, path: Any) -> Any:
        return super().list_directory(path) if self.listing else self.send_error(404)

    def log_message(self, *arguments: Any) -> None:
        pass


@contextlib.contextmanager
def serving(folder: Path, **lacks: Any) -> Iterator[tuple[str, type[Web]]]:
    handler = type("Handler", (Web,), lacks)
    with ThreadingHTTPServer(("127.0.0.1", 0), lambda *given: handler(*given, directory=str(folder))) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{httpd.server_port}", handler
        finally:
            httpd.shutdown()
            thread.join()


def test_one_tensor_is_read_without_the_others(published: Path) -> None:
    with serving(published) as (url, handler):
        assert np.array_equal(ckptfmt.load(f"{url}#llama", keys="extra")["extra"], np.zeros(10))
        assert handler.sent < 1 << 20  # of 8 MB


def test_without_a_listing_a_generation_is_named_by_itself(published: Path) -> None:
    with serving(published, listing=False) as (url, _):
        with pytest.raises(BackendError, match="name a generation's folder itself") as caught:
            ckptfmt.load(f"{url}#llama")
        assert caught.value.kind == "no_listing"
        loaded = ckptfmt.load(f"{url}/{_generation(published)}")
        assert loaded["model"]["w"][0] == 2


def test_without_ranges_nothing_large_is_read(published: Path) -> None:
    with serving(published, ranges=False) as (url, handler):
        with pytest.raises(BackendError, match="ranges") as caught:
            ckptfmt.load(f"{url}#llama")
        assert caught.value.kind == "no_ranges"
        assert handler.sent < 8 << 20


@pytest.mark.parametrize(
    ("status", "error"), [(403, AccessDenied), (401, AccessDenied), (500, Unavailable), (503, Unavailable)]
)
def test_what_cannot_be_read_is_not_called_absent(published: Path, status: int, error: type[Exception]) -> None:
    # FR-082: fsspec's HTTP file system calls all of these FileNotFoundError when it is asked for a length
    with serving(published, status=status) as (url, _):
        backend = backend_for(url)
        with pytest.raises(error):
            backend.head("ckptfmt.json")
        with pytest.raises(error):
            backend.list("runs")
        with pytest.raises(error):
            ckptfmt.load(f"{url}#llama")


def test_a_server_that_is_gone_is_unavailable(published: Path) -> None:
    with serving(published) as (url, _):
        backend = backend_for(url)
        assert backend.head("ckptfmt.json").nbytes > 0
    with pytest.raises(Unavailable, match=r"ckptfmt\.json"):
        backend.head("ckptfmt.json")
    with pytest.raises(Unavailable):
        backend.list("runs")


def test_a_short_object_is_truncated_not_padded(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"12345")
    with serving(tmp_path) as (url, _):
        backend = backend_for(url)
        for offset, nbytes in ((0, 6), (5, 1), (100, 1)):
            with pytest.raises(Corrupt, match="short"):
                backend.read_into("short", offset, memoryview(bytearray(nbytes)))
        buffer = bytearray(2)
        backend.read_into("short", 3, memoryview(buffer))
        assert buffer == b"45"
