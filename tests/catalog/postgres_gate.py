"""A gate of the proxy that knows where PostgreSQL's requests and answers end.

Message format: https://www.postgresql.org/docs/current/protocol-message-formats.html.
"""

from __future__ import annotations

from typing import Literal

from tcp_proxy import Gate

Way = Literal["before", "after"]


class AnswerGate(Gate):
    """Cuts at one request of the first connection that comes that far; every later connection is left alone.

    Requests are counted from 0, the first after the login. ``before``: the server never sees it. ``after``: the server
    has done it, and its answer is lost. With ``at=None`` nothing is cut, and ``answered`` tells how many there were.
    """

    def __init__(self, at: int | None = None, way: Way = "after") -> None:
        self.at = at
        self.way = way
        self.cuts = 0
        self.answered = 0
        self._ready: dict[int, int] = {}
        self._unread: dict[int, bytes] = {}

    def to_server(self, connection: int, data: bytes) -> bytes | None:
        # The first "ready" ends the login: what comes then is request 0.
        here = self._ready.get(connection, 0) - 1
        if self._due(here) and self.way == "before" and data[:1] != b"X":
            self.cuts += 1
            return None
        return data

    def to_client(self, connection: int, data: bytes) -> bytes | None:
        for _ in range(self._ready_in(connection, data)):
            done = self._ready.get(connection, 0) - 1
            self._ready[connection] = done + 2
            if done >= -1:
                self.answered = max(self.answered, done + 1)
            if self._due(done) and self.way == "after":
                self.cuts += 1
                return None
        return data

    def _due(self, request: int) -> bool:
        return self.at is not None and not self.cuts and request == self.at

    def _ready_in(self, connection: int, data: bytes) -> int:
        """How many answers end in these bytes (message ReadyForQuery)."""
        unread = self._unread.get(connection, b"") + data
        count = 0
        while len(unread) >= 5:
            length = 1 + int.from_bytes(unread[1:5])
            if len(unread) < length:
                break
            count += unread[:1] == b"Z"
            unread = unread[length:]
        self._unread[connection] = unread
        return count
