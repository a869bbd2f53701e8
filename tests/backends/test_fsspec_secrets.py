"""What is told of an fsspec place holds no password, whoever wrote the words; and nothing acknowledged is removed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import fsspec
import pytest

from ckptfmt.backends import fsspec_kinds
from ckptfmt.backends.fsspec_backend import FsspecBackend
from ckptfmt.backends.fsspec_errors import translate
from ckptfmt.backends.fsspec_opening import shown
from ckptfmt.connect import backend_for
from ckptfmt.errors import CkptError, Unavailable
from ckptfmt.ports.backend import Backend


@pytest.fixture(params=[403, 404, 500])
def refusing(request: pytest.FixtureRequest) -> Iterator[str]:
    """A web server that says the same to everything; its URL with a password."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(request.param)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *words: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://user:PASS@SECRET@127.0.0.1:{server.server_address[1]}/r"
    server.shutdown()
    server.server_close()
    thread.join()


CALLS: list[Callable[[Backend], object]] = [
    lambda place: place.read_into("a", 0, memoryview(bytearray(5))),
    lambda place: place.read("a", limit=5),
    lambda place: place.head("a"),
    lambda place: place.list("a"),
]


@pytest.mark.parametrize("chained", ["", "simplecache::"])
def test_a_password_is_in_no_error(refusing: str, chained: str, caplog: pytest.LogCaptureFixture) -> None:
    place = backend_for(f"{chained}{refusing}")
    assert "SECRET" not in f"{place.url} {place!r}"
    for call in CALLS[:-1] if chained else CALLS:  # a chain's listing of what cannot be read is empty
        with caplog.at_level(logging.DEBUG, logger="ckptfmt"), pytest.raises(CkptError) as caught:
            call(place)
        assert "SECRET" not in str(caught.value)
    assert "SECRET" not in caplog.text


def test_a_password_is_in_no_error_of_opening() -> None:
    with pytest.raises(CkptError) as caught:
        backend_for("zip::http://user:SECRET@127.0.0.1:1/r.zip").head("a")
    assert "SECRET" not in str(caught.value)


def test_a_signature_is_in_no_error() -> None:
    """Where a server leads by a redirect, the query of the URL is as good as a password."""
    error = OSError("403, message='Forbidden', url='https://cdn.lan/x/y?X-Amz-Signature=SECRET&a=b' (is it yours?)")
    told = str(translate(error, "read", "hf://a/b"))
    assert "SECRET" not in told
    assert "https://cdn.lan/x/y" in told
    assert "(is it yours?)" in told


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("sftp://host:22/a@b", "sftp://host:22/a@b"),
        ("sftp://user:p@q@host:22/a:b@c/", "sftp://user@host:22/a:b@c"),
        ("zip::http://u:p@h/x.zip", "zip::http://u@h/x.zip"),
        ("hf://datasets/a", "hf://datasets/a"),
    ],
)
def test_only_passwords_are_left_out(url: str, told: str) -> None:
    assert shown(url) == told


class Store(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """A store that heeds ``mode="create"``. ``after_put`` is called once, when an object was stored."""

    cachable = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.objects: dict[str, bytes] = {}
        self.after_put: Callable[[], None] | None = None
        self.losses = 0
        """So many answers to questions are lost."""

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        if path in self.objects:
            raise FileExistsError(path)
        self.objects[path] = value
        after, self.after_put = self.after_put, None
        if after is not None:
            after()

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        if self.losses:
            self.losses -= 1
            raise ConnectionResetError("cut")
        if path not in self.objects:
            raise FileNotFoundError(path)
        return {"name": path, "size": len(self.objects[path]), "type": "file"}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        return self.objects[path][start:end]

    def rm_file(self, path: str) -> None:
        del self.objects[path]


def test_what_was_stored_is_not_removed_because_looking_at_it_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank that creates the same bytes has compared them in between, and counts on them."""
    name = f"{Store.__module__}.{Store.__qualname__}"
    monkeypatch.setitem(fsspec_kinds._KINDS, name, fsspec_kinds.Kind(create="mode", flat=True, serial=False))
    fs = Store()
    one, other = (FsspecBackend(fs, "root", "store://root") for _ in range(2))
    one.create_root()
    other.create_root()

    def other_creates() -> None:
        other.create("COMMIT.json", b"{}")
        fs.losses = 1

    fs.after_put = other_creates
    with pytest.raises(Unavailable):
        one.create("COMMIT.json", b"{}")
    assert other.read("COMMIT.json", limit=10) == b"{}"
