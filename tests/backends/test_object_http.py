"""The HTTP client beneath ``s3://``: what becomes of its connections."""

from __future__ import annotations

import gc
import http.client
import os
from collections.abc import Iterator

import pytest
from s3_gate import Reply, S3Gate, s3_gate
from s3_rig import RcloneServer

from ckptfmt.backends.http_client import HttpClient, NoAnswer


@pytest.fixture
def gate(rclone: RcloneServer) -> Iterator[S3Gate]:
    with s3_gate(rclone.port) as gate:
        yield gate


def _client(gate: S3Gate) -> HttpClient:
    return HttpClient(gate.endpoint, timeout=10, connect_timeout=10)


@pytest.mark.parametrize("is_older", [True, False])
def test_a_client_that_is_collected_in_a_cycle_closes_its_connections(
    gate: S3Gate, monkeypatch: pytest.MonkeyPatch, is_older: bool
) -> None:
    """Garbage is finalized in no order that one may rely on: sockets, too, before what owns them. A socket that nobody
    has closed is a warning, and warnings are errors here."""
    told: list[object] = []
    monkeypatch.setattr("sys.unraisablehook", told.append)
    gate.rule = lambda request, forward: Reply(200)
    client = _client(gate)
    client.exchange("GET", "/", {})
    if not is_older:  # than its connection
        younger = _client(gate)
        younger._idle.append(client._idle.pop())
        client = younger
        del younger
    descriptor = client._idle[0].sock.fileno()
    client.itself = client  # type: ignore[attr-defined]
    del client
    gc.collect()
    assert told == []
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_an_answer_that_is_cut_leaves_no_connection_open(gate: S3Gate) -> None:
    """One that ends with its connection has taken the socket over."""
    gate.rule = lambda request, forward: Reply(200, b"x" * 100, {"Connection": "close"}, cut=10)
    seen: list[http.client.HTTPResponse] = []

    def take(response: http.client.HTTPResponse) -> None:
        seen.append(response)
        raise EOFError("no more is wanted")

    with pytest.raises(NoAnswer):
        _client(gate).exchange("GET", "/", {}, sink=take)
    assert [response.isclosed() for response in seen] == [True]
