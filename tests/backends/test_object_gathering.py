"""Memory for parts that come in pieces is made once, used again, and given back."""

from __future__ import annotations

import random
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckptfmt.backends import crc, object_gathering
from ckptfmt.backends.object_gathering import Gathering

LENGTHS = [1000, 1000, 1000, 77]


def filled(gathering: Gathering, index: int, byte: int) -> bytes:
    length = LENGTHS[index]
    with gathering.added(index, 0, memoryview(bytes([byte]) * (length // 2))) as whole:
        assert whole is None
    with gathering.added(index, length // 2, memoryview(bytes([byte]) * (length - length // 2))) as whole:
        assert whole is not None
        return b"".join(whole)


def test_one_part_after_the_other_takes_the_memory_of_one() -> None:
    gathering = Gathering(LENGTHS.__getitem__)
    for index, length in enumerate(LENGTHS):
        assert filled(gathering, index, index + 1) == bytes([index + 1]) * length
        assert gathering._held == LENGTHS[0]
    gathering.forget()
    assert (gathering._held, gathering._idle) == (0, [])


def test_memory_is_bounded_whatever_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_gathering, "_MEMORY_MAX", 2000)
    gathering = Gathering(LENGTHS.__getitem__)
    for index in range(4):
        with gathering.added(index, 0, memoryview(b"x")) as whole:
            assert whole is None
    assert gathering._held == 2000
    for index, length in enumerate(LENGTHS):
        with gathering.added(index, 1, memoryview(bytes([index]) * (length - 1))) as whole:
            assert whole is not None
            assert b"".join(whole) == b"x" + bytes([index]) * (length - 1)
    assert gathering._held == 2000
    gathering.forget()
    assert gathering._held == 0


def test_every_code_for_crc_32_agrees() -> None:
    data = random.Random(1).randbytes(100_001)
    for view in (memoryview(data), memoryview(data)[3:70_000], memoryview(b"")):
        assert crc.crc32(view) == zlib.crc32(view)


def test_the_piece_that_is_last_is_not_copied() -> None:
    gathering = Gathering(LENGTHS.__getitem__)
    last = memoryview(bytearray(b"b" * 900))
    with gathering.added(0, 950, memoryview(b"c" * 50)) as whole:
        assert whole is None
    with gathering.added(0, 0, memoryview(b"a" * 50)) as whole:
        assert whole is None
    with gathering.added(0, 50, last) as whole:
        assert whole is not None
        assert any(piece is last for piece in whole)
        last[:] = b"B" * 900  # what is sent lies in the caller's memory
        assert b"".join(whole) == b"a" * 50 + b"B" * 900 + b"c" * 50
    assert gathering._rooms == {}


def test_a_part_is_given_once_when_its_pieces_come_at_the_same_time() -> None:
    piece_bytes, pieces = 64 << 10, 8
    wanted = [bytes([index]) * piece_bytes for index in range(pieces)]
    for _ in range(50):
        gathering = Gathering(lambda index: piece_bytes * pieces)
        together = threading.Barrier(pieces)

        def add(index: int, gathering: Gathering = gathering, together: threading.Barrier = together) -> bytes | None:
            together.wait(30)
            with gathering.added(0, index * piece_bytes, memoryview(wanted[index])) as whole:
                return None if whole is None else b"".join(whole)

        with ThreadPoolExecutor(pieces) as pool:
            found = [whole for whole in pool.map(add, range(pieces)) if whole is not None]
        assert found == [b"".join(wanted)]
        assert gathering._rooms == {}
