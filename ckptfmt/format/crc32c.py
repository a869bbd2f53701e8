"""CRC-32C (Castagnoli), which OCDBT asks for. In Python: what it covers are indices of kilobytes, at most megabytes."""

from __future__ import annotations

from typing import Final

_POLYNOMIAL: Final = 0x82F63B78


def _entry(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (_POLYNOMIAL if byte & 1 else 0)
    return byte


_TABLE: Final = tuple(map(_entry, range(256)))


def crc32c(data: bytes | bytearray) -> int:
    """The checksum of ``data``, as an unsigned number of 32 bits."""
    table, crc = _TABLE, 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF
