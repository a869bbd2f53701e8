"""The ``MultipartStore`` of S3: what each request says and what its answer means."""

from __future__ import annotations

import base64
import http.client
import xml.etree.ElementTree as ElementTree
import zlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final
from urllib.parse import unquote_plus
from xml.sax.saxutils import escape

from ckptfmt.backends.http_client import Answer, body_bytes, fill, skip
from ckptfmt.backends.object_errors import Cause, Failure
from ckptfmt.backends.object_store import Meta, Part, Upload
from ckptfmt.backends.s3_client import S3Client, document, failure_of
from ckptfmt.backends.s3_options import S3Place

_CONDITION: Final = {"If-None-Match": "*"}


class S3Store:
    """A bucket on S3 or a server that speaks as it does."""

    parts_max: Final = 10_000

    def __init__(self, place: S3Place) -> None:
        self.part_bytes: Final = place.options.part_bytes
        self._client: Final = S3Client(place)
        options = place.options
        self._kept: Final = {
            name: value
            for name, value in (
                ("x-amz-server-side-encryption", options.server_side_encryption),
                ("x-amz-server-side-encryption-aws-kms-key-id", options.sse_kms_key_id),
                ("x-amz-storage-class", options.storage_class),
            )
            if value is not None
        }
        """Of every object."""

    # -- whole objects -----------------------------------------------------------------------------
    def put(self, key: str, data: memoryview, *, absent: bool, crc: int | None = None) -> str | None:
        headers = {**self._kept, "Content-Type": "application/octet-stream", **(_CONDITION if absent else {})}
        headers["x-amz-checksum-crc32"] = encoded(zlib.crc32(data) if crc is None else crc)
        return self._client.call("PUT", key, headers=headers, body=data).headers.get("ETag")

    def get(self, key: str, limit: int) -> tuple[bytes, int]:
        found: list[bytes] = []
        size = 0

        def take(response: http.client.HTTPResponse) -> None:
            nonlocal size
            size = _length(response)
            if size <= limit:
                room = bytearray(size)
                fill(response, memoryview(room), lambda count: None)
                found.append(bytes(room))

        self._client.call("GET", key, sink=take)
        return b"".join(found), size

    def get_into(self, key: str, offset: int, view: memoryview) -> int:
        done = 0

        def count(nbytes: int) -> None:
            nonlocal done
            done += nbytes

        def take(response: http.client.HTTPResponse) -> None:
            first, size, length = *_span(response), _length(response)
            if not first <= offset < first + length:
                total = first + length if size is None else size
                raise Failure(Cause.RANGE, f"HTTP {response.status}: bytes {first} to {first + length}", size=total)
            skip(response, offset - first)  # the range was ignored, or rounded out
            fill(response, view[: min(len(view), first + length - offset)], count)

        try:
            self._client.call("GET", key, headers={"Range": f"bytes={offset}-{offset + len(view) - 1}"}, sink=take)
        except Failure as failure:
            if failure.cause is not Cause.LOST or not done:
                raise
        return done

    def head(self, key: str) -> Meta:
        answer = self._client.call("HEAD", key, headers={"x-amz-checksum-mode": "ENABLED"})
        told = answer.headers
        length = told.get("Content-Length") or ""
        if not length.isdecimal():
            raise _untold()
        return Meta(key, int(length), told.get("x-amz-checksum-crc32"), told.get("ETag"))

    def delete(self, key: str) -> None:
        try:
            self._client.call("DELETE", key)
        except Failure as failure:
            if failure.cause is not Cause.ABSENT:
                raise

    # -- listings ------------------------------------------------------------------------------------
    def list(self, prefix: str) -> Iterator[Meta]:
        for page in self._pages({"list-type": "2", "prefix": prefix}, "continuation-token", "NextContinuationToken"):
            for entry in page.findall("Contents"):
                yield Meta(page.key(entry, "Key"), int(entry.findtext("Size") or 0))

    def list_folders(self, prefix: str) -> Iterator[str]:
        query = {"list-type": "2", "prefix": prefix, "delimiter": "/"}
        for page in self._pages(query, "continuation-token", "NextContinuationToken"):
            for entry in page.findall("CommonPrefixes"):
                yield page.key(entry, "Prefix")[len(prefix) :].rstrip("/")

    def _pages(self, query: Mapping[str, str], marker: str, following: str) -> Iterator[Page]:
        asked = {**query, "encoding-type": "url"}
        while True:
            page = Page(self._client.call("GET", query=asked))
            yield page
            if not page.goes_on:
                return
            at = page.findtext(following)
            if not at and marker == "key-marker":
                return  # SeaweedFS does not say where; when these are aborted, the next sweep sees the others
            if not at or asked.get(marker) == at:
                raise Failure(Cause.OTHER, f"the listing goes on, but its {following} does not say where")
            asked[marker] = at
            if marker == "key-marker":  # a key, where the other is a token
                asked[marker] = page.unquoted(at)
                asked["upload-id-marker"] = page.findtext("NextUploadIdMarker") or ""

    # -- multipart uploads ---------------------------------------------------------------------------
    def begin(self, key: str) -> str:
        headers = {
            **self._kept,
            "Content-Type": "application/octet-stream",
            "x-amz-checksum-algorithm": "CRC32",
        }
        answer = self._client.call("POST", key, {"uploads": ""}, headers)
        upload = document(answer.body).findtext("UploadId")
        if not upload:
            raise Failure(Cause.OTHER, "the answer names no upload")
        return upload

    def put_part(self, key: str, upload: str, number: int, data: tuple[memoryview, ...], crc: int) -> Part:
        query = {"partNumber": str(number), "uploadId": upload}
        answer = self._client.call("PUT", key, query, {"x-amz-checksum-crc32": encoded(crc)}, data)
        etag = answer.headers.get("ETag")
        if not etag:
            raise Failure(Cause.OTHER, f"the answer to part {number} has no ETag")
        return Part(number, etag, crc, body_bytes(data))

    def complete(self, key: str, upload: str, parts: Sequence[Part], *, absent: bool) -> str | None:
        listed = "".join(
            f"<Part><PartNumber>{part.number}</PartNumber><ETag>{escape(part.etag)}</ETag>"
            f"<ChecksumCRC32>{encoded(part.crc)}</ChecksumCRC32></Part>"
            for part in parts
        )
        body = f'<CompleteMultipartUpload xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{listed}</CompleteMultipartUpload>'
        headers = {"Content-Type": "application/xml", **(_CONDITION if absent else {})}
        answer = self._client.call("POST", key, {"uploadId": upload}, headers, body.encode())
        told = document(answer.body)
        if told.tag == "Error":  # said after the status, which had to be sent in time
            raise failure_of(answer)
        return told.findtext("ETag")

    def checksum(self, parts: Sequence[Part]) -> str:
        """What S3 calls a composite CRC-32."""
        joined = b"".join(part.crc.to_bytes(4, "big") for part in parts)
        return f"{encoded(zlib.crc32(joined))}-{len(parts)}"

    def abort(self, key: str, upload: str) -> None:
        try:
            self._client.call("DELETE", key, {"uploadId": upload})
        except Failure as failure:
            if failure.cause not in (Cause.NO_UPLOAD, Cause.ABSENT):
                raise

    def uploads(self, prefix: str) -> Iterator[Upload]:
        for page in self._pages({"uploads": "", "prefix": prefix}, "key-marker", "NextKeyMarker"):
            for entry in page.findall("Upload"):
                age = page.age(entry.findtext("Initiated") or "")
                key = page.key(entry, "Key")
                if key.startswith(prefix):  # some servers take no prefix here
                    yield Upload(key, entry.findtext("UploadId") or "", age)

    def upload_bytes(self, upload: Upload) -> int:
        page = Page(self._client.call("GET", upload.key, {"uploadId": upload.id}))
        return sum(int(entry.findtext("Size") or 0) for entry in page.findall("Part"))

    def close(self) -> None:
        self._client.close()


class Page:
    """One page of a listing."""

    def __init__(self, answer: Answer) -> None:
        self._root = document(answer.body)
        self.findall = self._root.findall
        self.findtext = self._root.findtext
        self.goes_on = self._root.findtext("IsTruncated") == "true"
        self._quoted = self._root.findtext("EncodingType") == "url"
        self._told = answer.headers.get("Date")

    def key(self, entry: ElementTree.Element, tag: str) -> str:
        return self.unquoted(entry.findtext(tag) or "")

    def unquoted(self, text: str) -> str:
        """Not every server quotes keys when it is asked to."""
        return unquote_plus(text) if self._quoted else text

    def age(self, began: str) -> float:
        """Seconds since ``began``, by the server's clock; 0 where it does not say so that it can be understood."""
        try:
            now = parsedate_to_datetime(self._told) if self._told else datetime.now(UTC)
            return max(0.0, (now - datetime.fromisoformat(began.replace("Z", "+00:00"))).total_seconds())
        except (TypeError, ValueError):
            return 0.0


def encoded(crc: int) -> str:
    """A CRC-32 as S3 writes it."""
    return base64.b64encode(crc.to_bytes(4, "big")).decode()


def _length(response: http.client.HTTPResponse) -> int:
    if response.length is None:
        raise _untold()
    return response.length


def _untold() -> Failure:
    return Failure(Cause.OTHER, "the answer does not say how long the object is")


def _span(response: http.client.HTTPResponse) -> tuple[int, int | None]:
    """Where the bytes begin that the server sends, and the size of the whole object where it tells.

    By the header alone: rclone sends a range as if it were the whole, with status 200.
    """
    told = response.headers.get("Content-Range")
    if response.status == 206 and not told:
        raise Failure(Cause.OTHER, "HTTP 206 without Content-Range: it is not known which bytes came")
    span, _, size = (told or "").removeprefix("bytes ").partition("/")
    first = span.partition("-")[0]
    return int(first) if first.isdecimal() else 0, int(size) if size.isdecimal() else None
