"""Digests: xxh3-128 over chunks of consecutive bytes.

They find accidents (bit rot, torn writes, mixed-up objects), not tampering: xxh3 is no
cryptographic hash. A digest is the 16 bytes of the canonical (big-endian) form; as text 32
lower-case hex digits. https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
"""

from __future__ import annotations

from typing import Final

import xxhash

from ckptfmt.errors import InvalidInput

Buffer = bytes | bytearray | memoryview

ALGORITHM: Final = "xxh3-128"
CHUNK_BYTES: Final = 8 << 20
"""Bytes of one chunk unless a manifest says otherwise."""
DIGEST_BYTES: Final = 16
HEX_DIGITS: Final = 32


def digest(buffer: Buffer) -> bytes:
    """Return the 16-byte digest of contiguous ``buffer``. Lets go of the GIL for large ones."""
    return xxhash.xxh3_128_digest(buffer)


def hex_digest(buffer: Buffer) -> str:
    """Return the digest as 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(buffer)


def chunk_count(nbytes: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Return how many chunks (and digests) ``nbytes`` bytes have: none for no bytes."""
    if nbytes < 0 or chunk_bytes <= 0:
        raise InvalidInput(f"a chunk rule needs nbytes >= 0 and chunk_bytes > 0, got {nbytes} and {chunk_bytes}")
    return -(-nbytes // chunk_bytes)


def chunk_spans(nbytes: int, chunk_bytes: int = CHUNK_BYTES) -> list[tuple[int, int]]:
    """Return (offset, length) of every chunk of a box of ``nbytes`` bytes, in order; only the last may be short."""
    count = chunk_count(nbytes, chunk_bytes)
    return [(i * chunk_bytes, min(chunk_bytes, nbytes - i * chunk_bytes)) for i in range(count)]
