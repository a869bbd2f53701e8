"""A TCP proxy that cuts, delays and swallows what passes it, as its ``Gate`` says."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


class Gate:
    """What happens to the bytes of the connections. Of a subclass, one object serves all of them.

    Each method returns what to pass on (perhaps nothing yet), or None to cut the connection. It may sleep, which
    delays. Calls for one direction of one connection come one after the other; those of others, at the same time.
    """

    def to_server(self, connection: int, data: bytes) -> bytes | None:
        return data

    def to_client(self, connection: int, data: bytes) -> bytes | None:
        return data


class _Passage:
    """One client's connection, and the one to the server that belongs to it."""

    def __init__(self, number: int, client: socket.socket, server: socket.socket, gate: Gate) -> None:
        self._ends = (client, server)
        self._number = number
        self._running = 2
        self._lock = threading.Lock()
        for source, target, passing in ((client, server, gate.to_server), (server, client, gate.to_client)):
            threading.Thread(target=self._pass, args=(source, target, passing), daemon=True).start()

    def cut(self) -> None:
        with self._lock:
            if self._running:
                for end in self._ends:
                    _shut(end)

    def _pass(
        self, source: socket.socket, target: socket.socket, passing: Callable[[int, bytes], bytes | None]
    ) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                passed = passing(self._number, data)
                if passed is None:
                    break
                target.sendall(passed)
        self.cut()
        with self._lock:
            self._running -= 1
            if not self._running:
                for end in self._ends:
                    end.close()


class TcpProxy:
    """Passes connections to its ``port`` on 127.0.0.1 on to the port ``target`` there. ``made`` counts them."""

    def __init__(self, target: int, gate: Gate | None = None) -> None:
        self.gate = gate or Gate()
        self.made = 0
        self.refusing = False
        """Cut every new connection at once."""
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._passages: list[_Passage] = []
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def cut(self) -> None:
        """End all connections, as a network does that goes."""
        for passage in list(self._passages):
            passage.cut()

    def close(self) -> None:
        _shut(self._listener)
        self._accepting.join()
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        for number in itertools.count():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.made += 1
            try:
                if self.refusing:
                    raise ConnectionRefusedError
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                client.close()
            else:
                self._passages.append(_Passage(number, client, server, self.gate))


def _shut(each: socket.socket) -> None:
    with suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)


@contextmanager
def tcp_proxy(target: int, gate: Gate | None = None) -> Iterator[TcpProxy]:
    proxy = TcpProxy(target, gate)
    try:
        yield proxy
    finally:
        proxy.close()
