"""An HTTP proxy before an S3 server that answers, alters, delays and swallows requests as its ``rule`` says."""

from __future__ import annotations

import http.client
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit


@dataclass
class Request:
    """What a client asks. A rule may change ``headers`` and ``body`` before it is passed on."""

    number: int
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    """By lower-case names."""
    body: bytes

    @property
    def is_part(self) -> bool:
        return self.method == "PUT" and "partNumber" in self.query

    @property
    def is_put(self) -> bool:
        return self.method == "PUT" and not self.query

    @property
    def is_complete(self) -> bool:
        return self.method == "POST" and "uploadId" in self.query


@dataclass
class Reply:
    """What the client gets. ``cut`` = so many bytes of the body, then the end of the connection."""

    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    cut: int | None = None

    @classmethod
    def error(cls, status: int, code: str, **headers: str) -> Reply:
        body = f"<Error><Code>{code}</Code><Message>so says the gate</Message></Error>".encode()
        return cls(status, body, {"Content-Type": "application/xml", **headers})


Forward = Callable[[Request], Reply]
Rule = Callable[[Request, Forward], Reply | None]
"""Returns the reply, or None to hang up without one."""


def passing(request: Request, forward: Forward) -> Reply | None:
    return forward(request)


def _is_consecutive(completion: bytes) -> bool:
    numbers = [int(number) for number in re.findall(rb"<PartNumber>(\d+)</PartNumber>", completion)]
    return numbers == [*range(1, len(numbers) + 1)]


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no error here."""


class S3Gate:
    """Listens at ``port``. ``seen`` are all requests so far, in the order in which they came."""

    def __init__(self, target: int, tls: ssl.SSLContext | None = None) -> None:
        self.rule: Rule = passing
        self.seen: list[Request] = []
        self._target = target
        self._lock = threading.Lock()
        self._server = _Listener(("127.0.0.1", 0), self._handler())
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self._scheme = "http" if tls is None else "https"
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self.port}"

    def count(self, what: Callable[[Request], bool]) -> int:
        return sum(map(what, list(self.seen)))

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def forward(self, request: Request) -> Reply:
        if request.is_complete and not _is_consecutive(request.body):
            # As AWS has it where parts have checksums, and where the bucket is a directory; other servers take gaps.
            return Reply(400, b"<Error><Code>InvalidPartOrder</Code></Error>")
        connection = http.client.HTTPConnection("127.0.0.1", self._target, timeout=30)
        try:
            connection.putrequest(request.method, request.path, skip_host=True, skip_accept_encoding=True)
            for name, value in request.headers.items():
                if name not in ("connection", "content-length"):
                    connection.putheader(name, value)
            connection.putheader("Content-Length", str(len(request.body)))
            connection.endheaders(request.body)
            with connection.getresponse() as response:
                return Reply(response.status, response.read(), dict(response.headers.items()))
        finally:
            connection.close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        gate = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                super().setup()

            def _serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                query = dict(parse_qsl(urlsplit(self.path).query, keep_blank_values=True))
                headers = {name.lower(): value for name, value in self.headers.items()}
                with gate._lock:
                    request = Request(len(gate.seen), self.command, self.path, query, headers, body)
                    gate.seen.append(request)
                try:
                    reply = gate.rule(request, gate.forward)
                except OSError:
                    reply = None  # the server is gone
                if reply is None:
                    self.close_connection = True
                    return
                with suppress(OSError):
                    self._answer(reply)

            def _answer(self, reply: Reply) -> None:
                lines = [f"HTTP/1.1 {reply.status} {http.client.responses.get(reply.status, '')}"]
                kept = {name: value for name, value in reply.headers.items() if name.lower() != "content-length"}
                length = reply.headers.get("Content-Length") if self.command == "HEAD" else str(len(reply.body))
                if reply.status != 204:
                    kept["Content-Length"] = length or "0"
                lines += [f"{name}: {value}" for name, value in kept.items()]
                self.wfile.write("\r\n".join([*lines, "", ""]).encode())
                self.wfile.write(reply.body if reply.cut is None else reply.body[: reply.cut])
                if reply.cut is not None:
                    self.close_connection = True

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve

            def log_message(self, *words: Any) -> None: ...

        return Handler


@contextmanager
def s3_gate(target: int, tls: ssl.SSLContext | None = None) -> Iterator[S3Gate]:
    gate = S3Gate(target, tls)
    try:
        yield gate
    finally:
        gate.close()
