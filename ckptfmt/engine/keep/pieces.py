"""A source for copies where no place has all of a pack: each chunk comes from wherever it is whole."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from ckptfmt.engine import protocol
from ckptfmt.engine.nearest import Nearest
from ckptfmt.engine.opened import Opened
from ckptfmt.engine.read import read_header
from ckptfmt.engine.read_plan import Chunk
from ckptfmt.errors import BackendError, Corrupt, FormatError, NotFound
from ckptfmt.format import checksum
from ckptfmt.format.tables import PackRow
from ckptfmt.ports.backend import ObjectInfo


class Pieces:
    """The packs of a generation as one backend to read from. Every byte that it gives was compared with a digest."""

    def __init__(self, opened: Opened) -> None:
        self._nearest: Nearest = opened.nearest
        self._rows: dict[str, PackRow] = {protocol.pack_key(opened.folder, row): row for row in opened.manifest.packs}
        self._chunks: dict[str, list[Chunk]] = {key: [] for key in self._rows}
        for tensor in opened.stored.all:
            for box in tensor.boxes:
                spans = enumerate(checksum.chunk_spans(box.nbytes, box.chunk_bytes))
                self._chunks[box.pack] += [
                    (box, number, box.offset + inner, nbytes) for number, (inner, nbytes) in spans if nbytes
                ]
        for chunks in self._chunks.values():
            chunks.sort(key=lambda chunk: chunk[2])
        self._headers: dict[str, bytes] = {}

    @property
    def url(self) -> str:
        return "all tiers together"

    def head(self, key: str) -> ObjectInfo:
        return ObjectInfo(key, self._rows[key].nbytes)

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """As ``Backend.read_into``; ``Corrupt`` also for what is whole nowhere."""
        header = self._header(key)
        if offset < len(header):
            count = min(len(buffer), len(header) - offset)
            buffer[:count] = header[offset : offset + count]
        end = offset + len(buffer)
        whole: list[Chunk] = []
        for chunk in self._touched(key, offset, end):
            if offset <= chunk[2] and chunk[2] + chunk[3] <= end:
                whole.append(chunk)
            else:
                self._part_of(key, chunk, offset, buffer)
        if whole:
            start, stop = whole[0][2], whole[-1][2] + whole[-1][3]
            self._nearest.fill(key, start, buffer[start - offset : stop - offset], whole)

    def _touched(self, key: str, start: int, end: int) -> Iterable[Chunk]:
        chunks = self._chunks[key]
        first = max(0, bisect_right(chunks, start, key=lambda chunk: chunk[2]) - 1)
        for chunk in chunks[first:]:
            if chunk[2] >= end:
                return
            if chunk[2] + chunk[3] > start:
                yield chunk

    def _part_of(self, key: str, chunk: Chunk, offset: int, buffer: memoryview) -> None:
        """Only a whole chunk can be compared: read it, and take the part."""
        _, _, start, nbytes = chunk
        data = memoryview(bytearray(nbytes))
        self._nearest.fill(key, start, data, [chunk])
        low, high = max(start, offset), min(start + nbytes, offset + len(buffer))
        buffer[low - offset : high - offset] = data[low - start : high - start]

    def _header(self, key: str) -> bytes:
        if key not in self._headers:
            self._headers[key] = self._read_header(key)
        return self._headers[key]

    def _read_header(self, key: str) -> bytes:
        for tier in self._nearest.tiers:
            for place in (key, *self._nearest.repairs.of(tier, key)):
                try:
                    return read_header(tier.backend, place, self._rows[key])
                except (BackendError, NotFound, FormatError):
                    continue
        raise Corrupt(f"the header of {key} is whole on no tier", object=key, offset=0)
