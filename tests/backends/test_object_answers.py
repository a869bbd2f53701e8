"""Answers that no good server gives: none of them is taken for the answer to another request, or for other bytes."""

from __future__ import annotations

import base64
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from ckptfmt.backends.object import ObjectBackend
from ckptfmt.backends.object_errors import Cause, Failure
from ckptfmt.backends.obstore_store import AzureOptions, GcsOptions
from ckptfmt.backends.s3 import s3_backend
from ckptfmt.backends.s3_client import S3Client, document
from ckptfmt.backends.s3_credentials import CredentialChain, chain
from ckptfmt.backends.s3_options import parse_place
from ckptfmt.errors import AccessDenied, BackendError, InvalidInput, Unavailable

Serve = Callable[[BaseHTTPRequestHandler], None]


@contextmanager
def answering(serve: Serve) -> Iterator[dict[str, Any]]:
    """A server that does as ``serve`` says; the ``storage_options`` that lead there."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            serve(self)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve

        def log_message(self, *words: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield {"endpoint": endpoint, "key": "k", "secret": "s", "retry_attempts": 2, "timeout": 20}
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def reply(ask: BaseHTTPRequestHandler, status: int, body: bytes = b"", **headers: str) -> None:
    ask.send_response(status)
    for name, value in headers.items():
        ask.send_header(name.replace("_", "-"), value)
    ask.send_header("Content-Length", str(len(body)))
    ask.end_headers()
    ask.wfile.write(body)


def backend(options: dict[str, Any]) -> ObjectBackend:
    return s3_backend("s3://buck/x", options)


def test_what_is_said_in_between_is_no_answer_to_the_next_request() -> None:
    """A server that says 102 says how it ended later: by then the connection would be another request's."""
    asked = threading.Event()
    first = threading.Event()

    def serve(ask: BaseHTTPRequestHandler) -> None:
        if ask.path.endswith("/one") and not first.is_set():
            first.set()
            ask.wfile.write(b"HTTP/1.1 102 Processing\r\n\r\n")
            asked.wait(10)
        reply(ask, 200, ask.path.encode())

    with answering(serve) as options:
        client = S3Client(parse_place("s3://buck", options))
        with pytest.raises(Failure) as caught:
            client.call("GET", "one")
        assert caught.value.cause is Cause.LOST
        threading.Timer(0.2, asked.set).start()
        assert client.call("GET", "two").body == b"/buck/two"
        client.close()
    with answering(serve) as options:
        first.clear()
        asked.set()
        assert backend(options).read("one", limit=100) == b"/buck/x/one"  # it is asked again


def test_a_range_that_does_not_say_where_it_lies_is_refused() -> None:
    data = bytes(number % 251 for number in range(5000))

    def serve(ask: BaseHTTPRequestHandler) -> None:
        first, last = map(int, ask.headers["Range"].removeprefix("bytes=").split("-"))
        reply(ask, 206, data[first : last + 1])

    buffer = memoryview(bytearray(1000))
    with answering(serve) as options, pytest.raises(BackendError, match="Content-Range"):
        backend(options).read_into("o", 100, buffer)
    assert bytes(buffer) == bytes(1000)


def test_an_object_whose_length_is_not_told_is_an_error_of_ours() -> None:
    def serve(ask: BaseHTTPRequestHandler) -> None:
        ask.send_response(200)
        ask.send_header("Transfer-Encoding", "chunked")
        ask.end_headers()

    with answering(serve) as options, pytest.raises(BackendError, match="how long"):
        backend(options).head("o")


def test_a_region_is_learned_from_an_answer_without_a_body() -> None:
    """S3 says 400 to a HEAD that is signed for another region, and where the bucket is in a header only."""

    def serve(ask: BaseHTTPRequestHandler) -> None:
        if "/eu-9/" in ask.headers["Authorization"]:
            return reply(ask, 200, b"12")
        ask.send_response(400)
        ask.send_header("x-amz-bucket-region", "eu-9")
        ask.send_header("Content-Length", "0")
        ask.end_headers()

    with answering(serve) as options:
        assert backend(options).head("o").nbytes == 2


def test_a_region_that_is_none_is_not_signed() -> None:
    body = b"<Error><Code>AuthorizationHeaderMalformed</Code><Region>eu\r\nX: y</Region></Error>"
    with answering(lambda ask: reply(ask, 400, body)) as options, pytest.raises(BackendError):
        backend(options).read("o", limit=10)


def test_xml_that_defines_entities_is_refused() -> None:
    inner = b"A" * 1000
    bomb = b'<!DOCTYPE l [<!ENTITY a "' + inner + b'">]><Error><Code>' + b"&a;" * 50 + b"</Code></Error>"
    with pytest.raises(Failure, match="DTD"):
        document(bomb)
    with answering(lambda ask: reply(ask, 403, bomb)) as options, pytest.raises(BackendError) as caught:
        backend(options).read("o", limit=10)
    assert "AAAA" not in str(caught.value)
    with answering(lambda ask: reply(ask, 200, bomb)) as options, pytest.raises(Unavailable, match="DTD"):
        backend(options).list("")


@pytest.mark.parametrize("initiated", ["", "yesterday"])
def test_an_upload_of_unknown_age_is_not_swept(initiated: str) -> None:
    listing = (
        f"<L><Upload><Key>x/f/o</Key><UploadId>u</UploadId><Initiated>{initiated}</Initiated></Upload></L>".encode()
    )
    asked: list[str] = []

    def serve(ask: BaseHTTPRequestHandler) -> None:
        asked.append(ask.command)
        ask.protocol_version = "HTTP/1.0"
        reply(ask, 200, listing if "uploads" in ask.path else b"<L></L>")

    with answering(serve) as options:
        assert backend(options).sweep_debris("", dry_run=False) == []
    assert "DELETE" not in asked


@pytest.mark.parametrize("value", ["SECRET\n", "SECRET\nX: y", "SECRET€"])
@pytest.mark.parametrize("name", ["key", "secret", "token"])
def test_keys_that_no_header_can_hold_are_refused_and_not_told(name: str, value: str) -> None:
    with answering(lambda ask: reply(ask, 200, b"1")) as options, pytest.raises(AccessDenied, match=name) as caught:
        backend({**options, name: value}).head("o")
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize("name", ["storage_class", "server_side_encryption", "sse_kms_key_id"])
@pytest.mark.parametrize("value", ["a\r\nX: y", "€", ""])
def test_options_that_no_header_can_hold_are_refused(name: str, value: str) -> None:
    with pytest.raises(InvalidInput, match=name):
        s3_backend("s3://buck/x", {name: value})


@pytest.mark.parametrize("endpoint", ["https://host:abc", "https://host:99999", "https://[::1", "a:SECRET@host"])
def test_an_endpoint_that_is_none_is_refused(endpoint: str) -> None:
    with pytest.raises(InvalidInput, match="endpoint") as caught:
        s3_backend("s3://buck/x", {"endpoint": endpoint})
    assert "SECRET" not in str(caught.value)


def test_certificates_are_checked_or_not_as_the_words_say(tmp_path: Path) -> None:
    def verify(given: Any) -> Any:
        return parse_place("s3://buck", {"verify": given}).options.verify

    assert [verify(given) for given in (True, "true", "1", False, "false", "0")] == [True] * 3 + [False] * 3
    assert parse_place("s3://buck?verify=false").options.verify is False
    (tmp_path / "ca").write_text("none")
    for bad in ("", str(tmp_path / "absent"), str(tmp_path / "ca")):
        with pytest.raises(InvalidInput, match="verify"):
            s3_backend("s3://buck", {"verify": bad})


# -- where keys come from ---------------------------------------------------------------------------------
@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings of whoever runs the tests."""
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def keys(**options: Any) -> CredentialChain:
    none: dict[str, Any] = dict.fromkeys(("key", "secret", "token", "provider", "profile"))
    return chain(**{**none, "region": "r", **options})


GIVEN = b'{"AccessKeyId":"a","SecretAccessKey":"b","Token":"c"}'


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_service_that_leads_elsewhere_is_not_followed(
    bare: None, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    asked: list[str] = []

    def serve_elsewhere(ask: BaseHTTPRequestHandler) -> None:
        asked.append(str(ask.headers))
        reply(ask, 200, GIVEN)

    with (
        answering(serve_elsewhere) as elsewhere,
        answering(lambda ask: reply(ask, status, Location=elsewhere["endpoint"])) as service,
    ):
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", service["endpoint"])
        monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN", "SECRET")
        with pytest.raises(AccessDenied):
            keys().current()
    assert asked == []


@pytest.mark.parametrize("url", ["http://keys.lan/c", "file:///etc/hostname", "ftp://keys.lan", "http://[::1", "x"])
def test_a_service_out_of_the_machine_is_asked_by_tls_only(
    bare: None, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", url)
    with pytest.raises(AccessDenied, match="AWS_CONTAINER_CREDENTIALS_FULL_URI"):
        keys().current()


def test_a_service_that_does_not_speak_http_gives_no_keys(bare: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def serve(ask: BaseHTTPRequestHandler) -> None:
        ask.wfile.write(b"garbage\r\n\r\n")
        ask.close_connection = True

    with answering(serve) as service:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", service["endpoint"])
        with pytest.raises(AccessDenied, match="no S3 credentials"):
            keys().current()


def test_keys_are_used_while_they_are_good_though_their_source_fails() -> None:
    asked: list[int] = []
    left = [60.0]

    def provide() -> dict[str, Any]:
        asked.append(1)
        if len(asked) > 1:
            raise RuntimeError("the vault is away")
        return {"key": "k", "secret": "s", "expires_at": time.time() + left[0]}

    found = keys(provider=provide)
    assert [found.current().key for _ in range(5)] == ["k"] * 5
    assert len(asked) == 2  # it is let alone for a while
    asked.clear()
    left[0] = -1.0
    expired = keys(provider=provide)
    expired.current()
    with pytest.raises(RuntimeError):
        expired.current()


def test_a_source_that_fails_is_not_replaced_by_another(bare: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The role of a container and that of its machine have different rights."""
    answers = [GIVEN[:-1] + b',"Expiration":"2001-01-01T00:00:00Z"}']
    with (
        answering(lambda ask: reply(ask, 200, answers.pop()) if answers else reply(ask, 503)) as container,
        answering(lambda ask: reply(ask, 200, GIVEN.replace(b'"a"', b'"other"'))) as machine,
    ):
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", container["endpoint"])
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", machine["endpoint"])
        monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
        found = keys()
        assert found.current().key == "a"
        with pytest.raises(Unavailable, match="container"):
            found.current()


def test_the_login_of_a_proxy_is_sent_to_the_proxy(bare: None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str]] = []

    def serve(ask: BaseHTTPRequestHandler) -> None:
        seen.append((ask.path, ask.headers["Proxy-Authorization"]))
        reply(ask, 200, b"1")

    with answering(serve) as proxy:
        monkeypatch.setenv("http_proxy", proxy["endpoint"].replace("//", "//user:pass%20word@"))
        monkeypatch.delenv("no_proxy", raising=False)
        backend({**proxy, "endpoint": "http://minio.lan", "allow_http": True}).head("o")
    assert seen == [("http://minio.lan/buck/x/o", f"Basic {base64.b64encode(b'user:pass word').decode()}")]


# -- what is shown ----------------------------------------------------------------------------------------
def test_options_show_no_secrets() -> None:
    secrets = {"key": "k", "secret": "SECRET", "token": "SECRET"}
    place = parse_place("s3://buck", secrets)
    google = GcsOptions(token="SECRET", service_account="file")
    azure = AzureOptions(account_key="SECRET", sas_token="SECRET", client_secret="SECRET", account_name="name")
    assert "SECRET" not in f"{place!r} {place.options!r} {place.options} {google!r} {azure!r}"
    for options in (place.options, google, azure):
        assert "SECRET" not in str(list(options.__rich_repr__()))
    assert "account_name='name'" in repr(azure)
    assert "retry_attempts=10" in repr(place.options)
