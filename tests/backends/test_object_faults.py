"""What the object backend does when the network, the server or the keys fail: each by what is known afterwards."""

from __future__ import annotations

import gc
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from s3_gate import Forward, Reply, Request, S3Gate, s3_gate
from s3_rig import KEY, SECRET, SeaweedServer, s3_server

from ckptfmt.backends.object import ObjectBackend
from ckptfmt.backends.object_gathering import Gathering
from ckptfmt.backends.object_probe import forget
from ckptfmt.backends.s3 import s3_backend
from ckptfmt.backends.s3_signing import Credentials, query_string, signed_headers
from ckptfmt.errors import AccessDenied, CkptError, Conflict, Corrupt, InvalidInput, NotFound, Unavailable
from ckptfmt.testing.backend_rig import at_once, pattern

PART = 5 << 20


@pytest.fixture
def gate(seaweed: SeaweedServer) -> Iterator[S3Gate]:
    with s3_gate(seaweed.port) as gate:
        yield gate


@pytest.fixture
def opened(seaweed: SeaweedServer, gate: S3Gate) -> Iterator[Callable[..., ObjectBackend]]:
    """Opens backends of one root, behind the gate."""
    root, backends = seaweed.new_root(), []

    def open_backend(**options: Any) -> ObjectBackend:
        given = {"key": KEY, "secret": SECRET, "endpoint": gate.endpoint, "part_bytes": PART, "upload_grace": 0}
        backends.append(s3_backend(f"s3://{root}", {**given, **options}))
        return backends[-1]

    yield open_backend
    for backend in backends:
        forget(backend.url)
        backend.close()


@pytest.fixture
def place(opened: Callable[..., ObjectBackend]) -> ObjectBackend:
    """Ready for writing; the server's manners are known, so that a rule meets what a test sends, and nothing else."""
    backend = opened()
    backend.create_root()
    put(backend, "known", pattern(PART + 1))
    return backend


def put(backend: ObjectBackend, key: str, data: bytes) -> None:
    writer = backend.open_writer(key, len(data))
    try:
        for at in range(0, len(data), PART):
            writer.write_at(at, data[at : at + PART])
        writer.finish()
    except BaseException:
        writer.abort()
        raise


def content(backend: ObjectBackend, key: str) -> bytes:
    return backend.read(key, limit=1 << 30)


def uploads(backend: ObjectBackend) -> list[str]:
    return [info.key for info in backend.sweep_debris("", dry_run=True)]


class Once:
    """Applies a rule to the first ``times`` requests of a kind; the others pass."""

    def __init__(
        self, kind: Callable[[Request], bool], rule: Callable[[Request, Forward], Reply | None], times: int = 1
    ) -> None:
        self._kind, self._rule, self._left, self._lock = kind, rule, times, threading.Lock()

    def __call__(self, request: Request, forward: Forward) -> Reply | None:
        with self._lock:
            met = self._left > 0 and self._kind(request)
            self._left -= met
        return self._rule(request, forward) if met else forward(request)


def lose_answer(request: Request, forward: Forward) -> None:
    forward(request)


def lose_request(request: Request, forward: Forward) -> None: ...


def refuse(status: int, code: str, **headers: str) -> Callable[[Request, Forward], Reply]:
    return lambda request, forward: Reply.error(status, code, **headers)


def is_put(request: Request) -> bool:
    return request.is_put


def is_part(request: Request) -> bool:
    return request.is_part


def is_complete(request: Request) -> bool:
    return request.is_complete


def is_get(request: Request) -> bool:
    return request.method == "GET" and not request.query


def resigned(request: Request, **query: str) -> Request:
    """The request as a client would send it that never heard of checksums, with ``query`` added."""
    path = request.path.partition("?")[0]
    asked = query_string({**request.query, **query})
    kept = {name: value for name, value in request.headers.items() if not name.startswith(("x-amz-", "authorization"))}
    request.headers = signed_headers(
        request.method,
        path,
        asked,
        kept,
        payload="UNSIGNED-PAYLOAD",
        credentials=Credentials(KEY, SECRET),
        region="us-east-1",
        when=time.time(),
    )
    request.path = f"{path}?{asked}" if asked else path
    return request


# -- answers that are lost ------------------------------------------------------------------------------
def test_a_create_whose_answer_is_lost_succeeds_once(place: ObjectBackend, gate: S3Gate) -> None:
    gate.rule = Once(is_put, lose_answer)
    place.create("x", b"ours")
    assert content(place, "x") == b"ours"


def test_a_create_all_of_whose_answers_are_lost_is_settled_by_reading(
    opened: Callable[..., ObjectBackend], place: ObjectBackend, gate: S3Gate
) -> None:
    hasty = opened(retry_attempts=2)
    gate.rule = Once(is_put, lose_answer, 2)
    hasty.create("x", b"ours")
    assert content(place, "x") == b"ours"


def test_a_create_that_was_never_carried_out_is_repeated(place: ObjectBackend, gate: S3Gate) -> None:
    gate.rule = Once(is_put, lose_request)
    place.create("x", b"ours")
    assert content(place, "x") == b"ours"


def test_a_create_whose_request_was_lost_while_another_came_first_is_conflict(
    place: ObjectBackend, gate: S3Gate
) -> None:
    def other_first(request: Request, forward: Forward) -> None:
        forward(resigned(Request(0, "PUT", request.path, {}, {"host": request.headers["host"]}, b"theirs")))

    gate.rule = Once(is_put, other_first)
    with pytest.raises(Conflict, match="x"):
        place.create("x", b"ours")
    assert content(place, "x") == b"theirs"


@pytest.mark.parametrize("times", [1, 3])
def test_a_completion_whose_answer_is_lost_succeeds_once(
    opened: Callable[..., ObjectBackend], place: ObjectBackend, gate: S3Gate, times: int
) -> None:
    hasty, data = opened(retry_attempts=3), pattern(2 * PART + 3)
    gate.rule = Once(is_complete, lose_answer, times)
    put(hasty, "x", data)
    assert content(place, "x") == data
    assert uploads(place) == []


def test_a_completion_that_fails_after_its_status_is_repeated(place: ObjectBackend, gate: S3Gate) -> None:
    gate.rule = Once(is_complete, refuse(200, "InternalError"))
    data = pattern(PART + 3)
    put(place, "x", data)
    assert content(place, "x") == data


def test_a_completion_that_never_comes_through_leaves_nothing(
    opened: Callable[..., ObjectBackend], place: ObjectBackend, gate: S3Gate
) -> None:
    gate.rule = Once(is_complete, lose_request, 100)
    with pytest.raises(Unavailable, match="x"):
        put(opened(retry_attempts=2), "x", pattern(PART + 3))
    with pytest.raises(NotFound):
        place.head("x")
    assert uploads(place) == []


def test_what_another_has_published_meanwhile_stays_where_a_completion_is_given_up(
    opened: Callable[..., ObjectBackend], place: ObjectBackend, gate: S3Gate
) -> None:
    """Two processes that copy one pack have the same bytes: whether it is one's own object cannot be told."""
    data = pattern(PART + 3)
    given_up = opened(retry_attempts=1).open_writer("x", len(data))
    given_up.write_at(0, data)
    gate.rule = Once(is_complete, lose_request)
    with pytest.raises(Unavailable):
        given_up.finish()
    put(place, "x", data)
    given_up.abort()
    assert content(place, "x") == data
    assert uploads(place) == []


# -- storms ---------------------------------------------------------------------------------------------
def test_many_writers_get_through_a_storm(
    opened: Callable[..., ObjectBackend], place: ObjectBackend, gate: S3Gate
) -> None:
    chance, began = random.Random(1), len(gate.seen)

    def storm(request: Request, forward: Forward) -> Reply:
        return Reply.error(503, "SlowDown") if chance.random() < 0.3 else forward(request)

    gate.rule = storm
    assert at_once([partial(place.create, f"x{n}", b"%d" % n) for n in range(64)]) == [None] * 64
    assert len(gate.seen) - began < 64 * 3
    gate.rule = forwarding
    assert all(content(place, f"x{n}") == b"%d" % n for n in range(64))


def forwarding(request: Request, forward: Forward) -> Reply:
    return forward(request)


@pytest.mark.parametrize(("status", "code"), [(500, "InternalError"), (503, "SlowDown"), (429, "TooManyRequests")])
def test_a_server_that_stays_busy_is_unavailable_after_the_budget(
    opened: Callable[..., ObjectBackend], place: ObjectBackend, gate: S3Gate, status: int, code: str
) -> None:
    hasty, began = opened(retry_attempts=3), len(gate.seen)
    gate.rule = refuse(status, code)
    with pytest.raises(Unavailable, match=code) as caught:
        hasty.read("x", limit=1)
    assert caught.value.transient
    assert len(gate.seen) - began == 3


@pytest.mark.slow
def test_the_pause_that_a_server_asks_for_is_kept_or_not_begun(
    opened: Callable[..., ObjectBackend], place: ObjectBackend, gate: S3Gate
) -> None:
    place.create("x", b"1")
    gate.rule = Once(is_get, refuse(503, "SlowDown", **{"Retry-After": "1"}))
    began = time.monotonic()
    assert content(place, "x") == b"1"
    assert time.monotonic() - began >= 1
    gate.rule = Once(is_get, refuse(503, "SlowDown", **{"Retry-After": "3600"}))
    with pytest.raises(Unavailable):
        content(place, "x")


def test_a_clash_of_creates_is_repeated(place: ObjectBackend, gate: S3Gate) -> None:
    gate.rule = Once(is_put, refuse(409, "ConditionalRequestConflict"))
    place.create("x", b"1")
    assert content(place, "x") == b"1"


@pytest.mark.slow
def test_a_silent_server_is_given_up(opened: Callable[..., ObjectBackend], place: ObjectBackend, gate: S3Gate) -> None:
    place.create("x", b"1")
    impatient, released = opened(timeout=0.3, retry_attempts=2), threading.Event()

    def silent(request: Request, forward: Forward) -> None:
        released.wait(30)

    gate.rule = Once(is_get, silent)
    assert content(impatient, "x") == b"1"
    gate.rule = Once(is_get, silent, 2)
    with pytest.raises(Unavailable, match="timed out"):
        content(impatient, "x")
    released.set()


def test_no_server_at_all_is_unavailable(opened: Callable[..., ObjectBackend], gate: S3Gate) -> None:
    backend = opened(retry_attempts=2)
    gate.close()
    with pytest.raises(Unavailable, match="endpoint"):
        backend.head("x")


@pytest.mark.parametrize(
    "bad",
    [
        {"retry_attempts": 0},
        {"retry_attempts": 1000},
        {"retry_seconds": -1},
        {"retry_seconds": float("nan")},
        {"timeout": 0},
        {"part_bytes": 1},
        {"upload_grace": -1},
        {"retry_attempts": "many"},
    ],
    ids=str,
)
def test_bad_settings_are_refused_before_anything_is_sent(bad: dict[str, Any]) -> None:
    with pytest.raises(CkptError, match=next(iter(bad))):
        s3_backend("s3://bucket/x", bad)


# -- bytes ------------------------------------------------------------------------------------------------
def damage(request: Request, forward: Forward) -> Reply:
    request.body = bytes([request.body[0] ^ 1]) + request.body[1:]
    return forward(request)


def test_bytes_that_change_on_their_way_are_sent_again(place: ObjectBackend, gate: S3Gate) -> None:
    data = pattern(2 * PART)
    gate.rule = Once(is_part, damage)
    put(place, "x", data)
    assert content(place, "x") == data


def test_bytes_that_change_every_time_are_unavailable_and_leave_nothing(
    opened: Callable[..., ObjectBackend], place: ObjectBackend, gate: S3Gate
) -> None:
    gate.rule = Once(is_part, damage, 100)
    with pytest.raises(Unavailable, match="changed"):
        put(opened(retry_attempts=2), "x", pattern(2 * PART))
    assert uploads(place) == []


def test_wrong_bytes_of_the_right_length_are_found_where_the_server_compares_nothing(
    opened: Callable[..., ObjectBackend], gate: S3Gate
) -> None:
    """Every request loses its checksum, and the answers have none."""
    gate.rule = lambda request, forward: forward(resigned(request))
    place = opened()
    place.create_root()
    data = pattern(2 * PART)
    put(place, "good", data)
    assert content(place, "good") == data
    for key, kind, size in (("part", is_part, 2 * PART), ("small", is_put, 1000)):
        gate.rule = lambda request, forward, kind=kind: (
            damage(resigned(request), forward) if kind(request) else forward(resigned(request))
        )
        with pytest.raises(Unavailable, match="differs") as caught:
            put(place, key, pattern(size))
        assert caught.value.kind == "upload_damaged"
        gate.rule = lambda request, forward: forward(resigned(request))
        with pytest.raises(NotFound):
            place.head(key)


def test_a_completion_without_one_of_its_parts_is_found(place: ObjectBackend, gate: S3Gate) -> None:
    def drop_part(request: Request, forward: Forward) -> Reply:
        first, _, rest = request.body.partition(b"</Part>")
        request.body = first + b"</Part></CompleteMultipartUpload>" if rest else first
        return forward(resigned(request))

    gate.rule = Once(is_complete, drop_part)
    with pytest.raises(Unavailable, match="differs"):
        put(place, "x", pattern(3 * PART))
    with pytest.raises(NotFound):
        place.head("x")


@pytest.mark.parametrize("cut", [0, 1, 1_000_000])
def test_a_download_that_is_cut_goes_on_where_it_ended(place: ObjectBackend, gate: S3Gate, cut: int) -> None:
    data = pattern(3_000_000)
    put(place, "x", data)

    def cut_short(request: Request, forward: Forward) -> Reply:
        reply = forward(request)
        reply.cut = cut
        return reply

    gate.rule = Once(is_get, cut_short, 2)
    buffer = bytearray(2_000_000)
    place.read_into("x", 500_000, memoryview(buffer))
    assert buffer == data[500_000:2_500_000]


def test_a_download_that_is_always_cut_is_never_whole(
    opened: Callable[..., ObjectBackend], place: ObjectBackend, gate: S3Gate
) -> None:
    place.create("x", bytes(1000))

    def nothing(request: Request, forward: Forward) -> Reply:
        reply = forward(request)
        reply.cut = 0
        return reply

    gate.rule = Once(is_get, nothing, 1000)
    with pytest.raises(Unavailable):
        opened(retry_attempts=2).read_into("x", 0, memoryview(bytearray(1000)))


def test_a_server_that_ignores_ranges_still_gives_the_right_bytes(place: ObjectBackend, gate: S3Gate) -> None:
    data = pattern(3_000_000)
    put(place, "x", data)

    def whole(request: Request, forward: Forward) -> Reply:
        request.headers.pop("range", None)
        return forward(request)

    gate.rule = whole
    buffer = bytearray(1000)
    place.read_into("x", 2_000_000, memoryview(buffer))
    assert buffer == data[2_000_000:2_001_000]
    with pytest.raises(Corrupt, match="truncated"):
        place.read_into("x", 2_999_500, memoryview(buffer))


# -- conditions ---------------------------------------------------------------------------------------------
def test_a_server_that_publishes_uploads_unconditionally_is_found_out(
    opened: Callable[..., ObjectBackend], gate: S3Gate
) -> None:
    """As Ceph's does. A taken key is then seen by looking, which suffices for names that only one writer has."""

    def ignore(request: Request, forward: Forward) -> Reply:
        if request.is_complete:
            request.headers.pop("if-none-match", None)
        return forward(request)

    gate.rule = ignore
    place = opened()
    place.create_root()
    data = pattern(PART + 1)
    put(place, "x", data)
    assert content(place, "x") == data
    late = place.open_writer("y", PART + 1)
    late.write_at(0, bytes(PART + 1))
    put(place, "y", data)
    with pytest.raises(Conflict, match="y"):
        late.finish()
    late.abort()
    assert content(place, "y") == data
    assert uploads(place) == []


def test_a_server_that_overwrites_is_not_written_to(opened: Callable[..., ObjectBackend], gate: S3Gate) -> None:
    def ignore(request: Request, forward: Forward) -> Reply:
        request.headers.pop("if-none-match", None)
        return forward(request)

    gate.rule = ignore
    place = opened()
    for call in (place.create_root, lambda: place.create("x", b"1")):
        with pytest.raises(InvalidInput, match="single_writer") as caught:
            call()
        assert caught.value.kind == "no_conditional_create"
    with pytest.raises(NotFound):
        place.head("x")
    assert place.list("") == []
    knowing = opened(single_writer=True)
    knowing.create_root()
    knowing.create("x", b"1")
    knowing.create("x", b"1")
    with pytest.raises(Conflict):
        knowing.create("x", b"2")


def test_the_server_is_asked_once_for_a_root(opened: Callable[..., ObjectBackend], gate: S3Gate) -> None:
    for _ in range(3):
        opened().create_root()
    assert gate.count(is_put) == 3  # one that stays, one that is refused, one whose checksum is wrong
    assert opened().list("") == []
    assert opened().sweep_debris("", dry_run=True) == []


@pytest.mark.slow
def test_uploads_of_one_key_at_once_never_remove_what_was_published(place: ObjectBackend) -> None:
    """SeaweedFS may take two completions at once, both told to publish only under a free key; the last one stays."""
    for key in "xyz":
        offers = [pattern(PART + 1, seed=n) for n in range(3)]
        writers = [place.open_writer(key, PART + 1) for _ in offers]
        for writer, data in zip(writers, offers, strict=True):
            writer.write_at(0, data)
        results = at_once([writer.finish for writer in writers])
        for writer in writers:
            writer.abort()
        assert all(result is None or isinstance(result, Conflict) for result in results)
        won = [data for data, result in zip(offers, results, strict=True) if result is None]
        assert content(place, key) in won
    assert uploads(place) == []


def test_an_upload_that_comes_late_is_conflict(place: ObjectBackend) -> None:
    late = place.open_writer("x", PART + 1)
    late.write_at(0, bytes(PART + 1))
    put(place, "x", pattern(PART + 1))
    with pytest.raises(Conflict, match="x"):
        late.finish()
    late.abort()
    assert content(place, "x") == pattern(PART + 1)
    assert uploads(place) == []


# -- keys -----------------------------------------------------------------------------------------------------
def only_with(key: str) -> Callable[[Request, Forward], Reply]:
    """The server knows this access key; the others have expired."""

    def check(request: Request, forward: Forward) -> Reply:
        if f"Credential={key}/" not in request.headers.get("authorization", ""):
            return Reply.error(403, "ExpiredToken")
        return forward(resigned(request))

    return check


def test_keys_that_expire_in_an_upload_are_renewed_once(
    opened: Callable[..., ObjectBackend], place: ObjectBackend, gate: S3Gate
) -> None:
    given = iter(["first", "second"])
    asked = []

    def provide() -> dict[str, str]:
        asked.append(next(given))
        return {"key": asked[-1], "secret": "s"}

    backend, data = opened(credentials=provide, key=None, secret=None), pattern(6 * PART)
    gate.rule = only_with("first")
    writer = backend.open_writer("x", len(data))
    for at in range(0, len(data), PART):
        writer.write_at(at, data[at : at + PART])
        if at == 2 * PART:
            gate.rule = only_with("second")
    writer.finish()
    assert content(place.__class__(backend._place, "s3", multipart=None), "x") == data
    assert asked == ["first", "second"]


def test_keys_that_stay_expired_are_access_denied(opened: Callable[..., ObjectBackend], gate: S3Gate) -> None:
    asked = []

    def provide() -> dict[str, str]:
        asked.append(1)
        return {"key": "first", "secret": "s"}

    backend = opened(credentials=provide, key=None, secret=None)
    gate.rule = only_with("second")
    began = len(gate.seen)
    with pytest.raises(AccessDenied, match="ExpiredToken"):
        backend.read("x", limit=1)
    with pytest.raises(AccessDenied):
        backend.read("x", limit=1)
    assert len(asked) == 2  # not for every refusal
    assert len(gate.seen) - began == 2


def test_a_wrong_secret_is_access_denied_and_never_told(opened: Callable[..., ObjectBackend]) -> None:
    backend = opened(secret="VERYSECRET", token="VERYSECRETTOO")
    with pytest.raises(AccessDenied, match="credentials") as caught:
        backend.create("x", b"1")
    told = f"{caught.value} {caught.value!r} {backend.url} {backend!r} {vars(backend._place)}"
    assert "VERYSECRET" not in told


def test_a_clock_that_is_wrong_is_put_right(
    place: ObjectBackend, gate: S3Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.create("x", b"1")
    real = time.time
    monkeypatch.setattr("ckptfmt.backends.s3_client.time.time", lambda: real() - 7200)
    assert content(place, "x") == b"1"


# -- leftovers ------------------------------------------------------------------------------------------------
def test_an_error_in_the_middle_publishes_nothing(place: ObjectBackend) -> None:
    writer = place.open_writer("x", 3 * PART)
    writer.write_at(0, bytes(PART))
    assert uploads(place) == ["x"]
    writer.abort()
    assert uploads(place) == []
    with pytest.raises(NotFound):
        place.head("x")


def test_a_dropped_writer_publishes_nothing_and_its_upload_is_swept(
    opened: Callable[..., ObjectBackend], place: ObjectBackend
) -> None:
    writer = place.open_writer("a/x", 3 * PART)
    writer.write_at(PART, bytes(PART))
    del writer
    gc.collect()
    with pytest.raises(NotFound):
        place.head("a/x")
    assert opened(upload_grace=3600).sweep_debris("", dry_run=False) == []
    assert place.sweep_debris("", dry_run=False, deep=False) == []
    assert place.sweep_debris("a", dry_run=False, only=["a/y"]) == []
    found = place.sweep_debris("a", dry_run=True)
    assert [(info.key, info.nbytes) for info in found] == [("a/x", PART)]
    assert place.sweep_debris("a", dry_run=False) == found
    assert uploads(place) == []


_VICTIM = """
import sys
from ckptfmt.backends.s3 import s3_backend
backend = s3_backend(sys.argv[1], {"key": sys.argv[2], "secret": sys.argv[3], "part_bytes": 5 << 20})
writer = backend.open_writer("x", 20 << 20)
writer.write_at(0, bytes(10 << 20))
print("half", flush=True)
sys.stdin.read()
"""


def test_the_upload_of_a_killed_process_is_swept(place: ObjectBackend) -> None:
    victim = subprocess.Popen(
        [sys.executable, "-c", _VICTIM, place.url, KEY, SECRET],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert victim.stdin is not None
    assert victim.stdout is not None
    with victim.stdin, victim.stdout:
        assert victim.stdout.readline() == b"half\n"
        victim.send_signal(signal.SIGKILL)
        victim.wait(30)
    assert uploads(place) == ["x"]
    assert [info.nbytes for info in place.sweep_debris("", dry_run=False)] == [10 << 20]
    assert uploads(place) == []
    with pytest.raises(NotFound):
        place.head("x")


def test_an_upload_that_was_swept_under_its_writer_is_dead(place: ObjectBackend) -> None:
    writer = place.open_writer("x", 2 * PART)
    writer.write_at(0, bytes(PART))
    place.sweep_debris("", dry_run=False)
    with pytest.raises(Unavailable, match="new name") as caught:
        writer.write_at(PART, bytes(PART))
    assert caught.value.kind == "upload_gone"
    writer.abort()


@pytest.mark.slow
def test_a_server_killed_in_an_upload_and_started_again_is_waited_for() -> None:
    with s3_server() as server:
        backend = s3_backend(f"s3://{server.new_root()}", server.options(part_bytes=PART, retry_attempts=20))
        backend.create_root()
        data = pattern(4 * PART + 5)
        writer = backend.open_writer("x", len(data))
        writer.write_at(0, data[: 2 * PART])
        server.kill()
        with ThreadPoolExecutor(2) as pool:
            rest = [pool.submit(writer.write_at, at, data[at : at + PART]) for at in range(2 * PART, len(data), PART)]
            server.start()
            for each in rest:
                each.result(60)
        writer.finish()
        assert content(backend, "x") == data
        forget(backend.url)
        backend.close()


# -- the rest -------------------------------------------------------------------------------------------------
def test_listings_go_on_over_pages(place: ObjectBackend, gate: S3Gate) -> None:
    for n in range(5):
        place.create(f"a/f{n}/x", b"1")
    began = len(gate.seen)

    def small_pages(request: Request, forward: Forward) -> Reply:
        if request.method == "GET" and "list-type" in request.query:
            request = resigned(request, **{"max-keys": "2"})
        return forward(request)

    gate.rule = small_pages
    assert [info.key for info in place.list("a")] == [f"a/f{n}/x" for n in range(5)]
    assert place.list_folders("a") == [f"f{n}" for n in range(5)]
    assert len(gate.seen) - began >= 6


def test_pieces_in_any_order_wait_in_files_when_they_are_many(
    place: ObjectBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptfmt.backends.object_gathering._MEMORY_MAX", PART)
    data = pattern(4 * PART + 77)
    pieces = [(at, data[at : at + 100_000]) for at in range(0, len(data), 100_000)]
    random.Random(3).shuffle(pieces)
    writer = place.open_writer("x", len(data))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda piece: writer.write_at(*piece), pieces))
    writer.finish()
    assert content(place, "x") == data


@pytest.mark.parametrize("compared", [True, False])
@pytest.mark.parametrize("write_parts", [0, 1, 2, 3])
def test_parts_are_as_large_as_writes_are_said_to_be(
    opened: Callable[..., ObjectBackend],
    place: ObjectBackend,
    gate: S3Gate,
    write_parts: int,
    compared: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend, data = opened(), pattern(5 * PART - 77)
    if not compared:  # then it is read back
        monkeypatch.setattr("ckptfmt.backends.s3_store.S3Store.checksum", lambda self, parts: "another")
    part_bytes = max(1, write_parts) * PART
    starts = range(0, len(data), part_bytes)
    writer = backend.open_writer("x", len(data), write_bytes=write_parts * PART)
    for start in reversed(starts):
        writer.write_at(start, data[start : start + part_bytes])
    writer.finish()
    assert content(place, "x") == data
    sent = [request for request in gate.seen if request.is_part][-len(starts) :]
    found = [(int(request.query["partNumber"]), int(request.headers["content-length"])) for request in sent]
    assert sorted(found) == [(number, len(data[start : start + part_bytes])) for number, start in enumerate(starts, 1)]


@pytest.mark.parametrize("sign_payload", [False, True])
def test_a_part_whose_rest_is_in_the_callers_memory_is_repeated_and_signed_whole(
    opened: Callable[..., ObjectBackend], place: ObjectBackend, gate: S3Gate, sign_payload: bool
) -> None:
    backend, data = opened(sign_payload=sign_payload), pattern(3 * PART + 77)
    gate.rule = Once(is_part, lose_answer, 2)
    cuts = [0, PART + 1000, 2 * PART + 5000, len(data)]
    writer = backend.open_writer("x", len(data))
    for start, stop in pairwise(cuts):
        writer.write_at(start, data[start:stop])
    writer.finish()
    assert content(place, "x") == data
    signed = [request.headers["x-amz-content-sha256"] for request in gate.seen if request.is_part][-3:]
    assert all((each == "UNSIGNED-PAYLOAD") != sign_payload for each in signed[:2])


def test_parts_that_are_never_whole_are_forgotten() -> None:
    gathering = Gathering(lambda index: 10)
    with gathering.added(0, 0, memoryview(b"12345")) as whole:
        assert whole is None
    gathering.forget()
    assert gathering._held == 0


def test_a_whole_part_goes_out_of_the_callers_memory(place: ObjectBackend) -> None:
    writer = place.open_writer("x", 2 * PART)
    writer.write_at(0, bytes(PART))
    assert writer._gathering._held == 0  # type: ignore[union-attr]
    assert set(writer._parts) == {0}  # type: ignore[union-attr]
    writer.abort()


def test_a_bucket_that_is_absent_is_not_found(opened: Callable[..., ObjectBackend], gate: S3Gate) -> None:
    backend = s3_backend("s3://no-such-bucket/x", {"endpoint": gate.endpoint, "key": KEY, "secret": SECRET})
    with pytest.raises(NotFound, match="no-such-bucket"):
        backend.list("")
    backend.close()


def test_a_prefix_of_any_text_is_one_place(seaweed: SeaweedServer) -> None:
    prefix = quote("/Größe 100%+a=b&c;d/~x")
    backend = s3_backend(f"s3://{seaweed.new_root()}{prefix}", seaweed.options())
    backend.create("f/x", b"1")
    assert [info.key for info in backend.list("")] == ["f/x"]
    assert backend.list_folders("") == ["f"]
    assert content(s3_backend(backend.url, {"key": KEY, "secret": SECRET}), "f/x") == b"1"
    backend.close()
