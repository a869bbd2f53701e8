"""HTTP to one server over kept connections, from any thread: bodies go out of, and come into, the caller's memory.

The standard library's client and nothing else: a part of an upload is sent from where it lies, a range is received
where it is wanted, and a request without an answer is told apart from one that was refused.
"""

from __future__ import annotations

import http.client
import os
import select
import socket
import ssl
import urllib.request
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from email.message import Message
from typing import Any, Final
from urllib.parse import SplitResult, unquote, urlsplit

from ckptfmt.backends.fork_locks import ForkLock
from ckptfmt.errors import InvalidInput

_BODY_LIMIT: Final = 64 << 20
"""Of answers that are read whole without a sink: listings and errors."""
_IDLE_MAX: Final = 64
_READ_AT_ONCE: Final = 1 << 20


Body = bytes | memoryview | tuple[memoryview, ...]
"""Of a request. What lies in several pieces of memory is sent as it lies."""


class NoAnswer(Exception):
    """The server did not answer, or not to the end. Whether it did what was asked is not known."""


@dataclass(frozen=True)
class Answer:
    """``body`` is empty where a sink took it."""

    status: int
    headers: Message
    body: bytes = field(repr=False, default=b"")


Sink = Callable[[http.client.HTTPResponse], None]
"""Receives the body of an answer that is no error. What it leaves unread costs the connection, no more."""


class HttpClient:
    """Connections to ``endpoint`` (``http://host[:port]`` or ``https://...``). ``timeout`` (seconds) is the longest
    silence of the server, ``connect_timeout`` for a connection to come about."""

    def __init__(
        self, endpoint: str, *, timeout: float, connect_timeout: float, verify: bool | str = True, proxied: bool = True
    ) -> None:
        self._url: Final = urlsplit(endpoint)
        self._timeout: Final = timeout
        self._connect_timeout: Final = connect_timeout
        self._tls: Final = _tls(verify) if self._url.scheme == "https" else None
        self._proxy: Final = _proxy(self._url) if proxied else None
        self._lock: Final = ForkLock()
        self._idle: Final[list[http.client.HTTPConnection]] = []
        # No __del__: of garbage in a cycle, sockets might be collected before it.
        weakref.finalize(self, _close_all, self._idle)
        self._pid = os.getpid()

    @property
    def host(self) -> str:
        """The value of the ``Host`` header."""
        return self._url.netloc

    def exchange(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: Body = b"",
        sink: Sink | None = None,
    ) -> Answer:
        """Send a request and read its answer whole, but for a body that ``sink`` takes. ``NoAnswer`` without one."""
        connection = self._connection()
        response: http.client.HTTPResponse | None = None
        whole = False
        try:
            response = self._ask(connection, method, target, headers, body)
            if response.status < 200:  # the answer to this request would be taken for that to the next one
                raise EOFError(f"HTTP {response.status}, which says that an answer follows")
            if sink is not None and 200 <= response.status < 300:
                sink(response)
                found = b""
            else:
                found = response.read(_BODY_LIMIT)
                if response.length and len(found) < _BODY_LIMIT:
                    raise EOFError(f"the answer ended {response.length} bytes early")
            whole = response.isclosed() and not response.will_close
            return Answer(response.status, response.headers, found)
        except (OSError, http.client.HTTPException, EOFError) as error:
            raise NoAnswer(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__) from error
        finally:
            if whole:
                self._keep(connection)
            else:
                connection.close()
                if response is not None:  # which has taken over a connection that ends with it
                    response.close()

    def _ask(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: Body,
    ) -> http.client.HTTPResponse:
        if self._proxy is not None and self._tls is None:
            target = f"http://{self._url.netloc}{target}"
            headers = {**headers, **_proxy_login(self._proxy)}
        connection.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name, value)
        nbytes = body_bytes(body)
        if nbytes or method in ("PUT", "POST"):
            connection.putheader("Content-Length", str(nbytes))
        try:
            connection.endheaders()
            for piece in pieces_of(body):
                connection.send(piece)
        except (BrokenPipeError, ConnectionResetError):
            # A server that refuses early hangs up while the body is on its way; its answer may be there to be read.
            with suppress(OSError, http.client.HTTPException):
                return connection.getresponse()
            raise
        return connection.getresponse()

    # -- connections -----------------------------------------------------------------------------
    def _connection(self) -> http.client.HTTPConnection:
        with self._lock:
            if self._pid != os.getpid():  # a fork: the connections are the parent's, which goes on to use them
                self._close_idle()
                self._pid = os.getpid()
            while self._idle:
                connection = self._idle.pop()
                if _is_quiet(connection):
                    return connection
                connection.close()
        return self._connect()

    def _connect(self) -> http.client.HTTPConnection:
        at = self._proxy or self._url
        host = at.hostname or ""
        connection: http.client.HTTPConnection
        if self._tls is not None:
            port = at.port or (443 if self._proxy is None else 3128)
            connection = http.client.HTTPSConnection(host, port, timeout=self._connect_timeout, context=self._tls)
            if self._proxy is not None:
                connection.set_tunnel(self._url.hostname or "", self._url.port or 443, _proxy_login(self._proxy))
        else:
            connection = http.client.HTTPConnection(host, at.port or 80, timeout=self._connect_timeout)
        try:
            connection.connect()
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswer(f"no connection to {self._url.netloc}: {error}") from error
        connection.sock.settimeout(self._timeout)
        return connection

    def _keep(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if self._pid == os.getpid() and len(self._idle) < _IDLE_MAX:
                self._idle.append(connection)
                return
        connection.close()

    def close(self) -> None:
        """Close the connections that are idle. Later requests open new ones."""
        with self._lock:
            self._close_idle()

    def _close_idle(self) -> None:
        _close_all(self._idle)


def _close_all(connections: list[http.client.HTTPConnection]) -> None:
    while connections:
        connections.pop().close()  # a descriptor of this process only: TLS is told nothing


def pieces_of(body: Body) -> tuple[bytes, ...] | tuple[memoryview, ...]:
    """The pieces that are not empty, in their order."""
    if isinstance(body, tuple):
        return tuple(piece for piece in body if len(piece))
    if isinstance(body, bytes):
        return (body,) if body else ()
    return (body,) if len(body) else ()


def body_bytes(body: Body) -> int:
    return sum(map(len, pieces_of(body)))


def fill(response: http.client.HTTPResponse, view: memoryview, progress: Callable[[int], None]) -> None:
    """Read exactly ``len(view)`` bytes; ``progress`` is told each piece. ``EOFError`` where the body ends before."""
    done = 0
    while done < len(view):
        count = response.readinto(view[done : done + _READ_AT_ONCE])
        if not count:
            raise EOFError(f"the body ended {len(view) - done} bytes early")
        done += count
        progress(count)


def skip(response: http.client.HTTPResponse, nbytes: int) -> None:
    """Read ``nbytes`` bytes and forget them."""
    room = memoryview(bytearray(min(nbytes, _READ_AT_ONCE)))
    while nbytes:
        count = response.readinto(room[: min(nbytes, len(room))])
        if not count:
            raise EOFError(f"the body ended {nbytes} bytes early")
        nbytes -= count


def _is_quiet(connection: http.client.HTTPConnection) -> bool:
    """Whether the other end has neither hung up nor sent what nobody asked for."""
    if connection.sock is None:
        return False
    poll = select.poll()
    poll.register(connection.sock, select.POLLIN)
    return not poll.poll(0)


def _tls(verify: bool | str) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=verify if isinstance(verify, str) else None)
    except OSError as error:
        raise InvalidInput(f"verify={verify}: no file with certificates in PEM ({error}); give its path") from error
    if verify is False:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _proxy(url: SplitResult) -> SplitResult | None:
    """The proxy that the environment names for this server, if any. This machine is never reached through one."""
    if is_this_machine(url.hostname or "") or urllib.request.proxy_bypass(url.hostname or ""):
        return None
    named = urllib.request.getproxies().get(url.scheme)
    return urlsplit(named if "://" in named else f"http://{named}") if named else None


def _proxy_login(proxy: SplitResult) -> dict[str, Any]:
    if not proxy.username:
        return {}
    import base64

    pair = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    return {"Proxy-Authorization": f"Basic {base64.b64encode(pair.encode()).decode()}"}


def is_this_machine(host: str) -> bool:
    if host == "localhost":
        return True
    for family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError):
            packed = socket.inet_pton(family, host)
            return packed[0] == 127 if family == socket.AF_INET else packed == bytes(15) + b"\x01"
    return False
