"""One signed request to S3 and its answer: keys renewed, clock and region put right, errors told apart."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import Final
from xml.etree.ElementTree import Element

from ckptfmt.backends.http_client import Answer, Body, HttpClient, NoAnswer, Sink, body_bytes, pieces_of
from ckptfmt.backends.object_errors import Cause, Failure, cause_of_status
from ckptfmt.backends.s3_credentials import CredentialChain, chain
from ckptfmt.backends.s3_options import S3Place
from ckptfmt.backends.s3_signing import EMPTY, UNSIGNED, Credentials, query_string, quoted, signed_headers
from ckptfmt.backends.xml_document import parsed

_SIGNED_BYTES: Final = 1 << 20
"""Bodies up to this size are always signed whole: commit records and what they rest on."""
_CODES: Final = {
    "NoSuchKey": Cause.ABSENT,
    "NoSuchVersion": Cause.ABSENT,
    "NoSuchBucket": Cause.NO_BUCKET,
    "NoSuchUpload": Cause.NO_UPLOAD,
    "PreconditionFailed": Cause.TAKEN,
    "ConditionalRequestConflict": Cause.CLASH,
    "OperationAborted": Cause.CLASH,
    "InvalidRange": Cause.RANGE,
    "BadDigest": Cause.DAMAGED,
    "XAmzContentChecksumMismatch": Cause.DAMAGED,
    "XAmzContentSHA256Mismatch": Cause.DAMAGED,
    "IncompleteBody": Cause.LOST,
    "RequestTimeout": Cause.LOST,
    "SlowDown": Cause.BUSY,
    "InternalError": Cause.BUSY,
    "ServiceUnavailable": Cause.BUSY,
    "Throttling": Cause.BUSY,
    "TooManyRequests": Cause.BUSY,
    "QuotaExceeded": Cause.FULL,
    "XMinioStorageFull": Cause.FULL,
    "ExpiredToken": Cause.DENIED,
    "ExpiredTokenException": Cause.DENIED,
    "InvalidToken": Cause.DENIED,
    "TokenRefreshRequired": Cause.DENIED,
    "NotImplemented": Cause.UNSUPPORTED,
    "MethodNotAllowed": Cause.UNSUPPORTED,
}
_SKEWED: Final = "RequestTimeTooSkewed"
_REGION: Final = re.compile(r"[A-Za-z0-9-]+")
_WRONG_REGION: Final = frozenset(
    {"AuthorizationHeaderMalformed", "PermanentRedirect", "IllegalLocationConstraintException"}
)


class S3Client:
    """Requests to one bucket. Thread-safe; sends each request once, but for what it could put right itself."""

    def __init__(self, place: S3Place) -> None:
        options = place.options
        self._place: Final = place
        self._http: Final = HttpClient(
            place.endpoint,
            timeout=options.timeout,
            connect_timeout=options.connect_timeout,
            verify=options.verify,
        )
        self._credentials: Final[CredentialChain | None] = (
            None
            if options.anon
            else chain(
                key=options.key,
                secret=options.secret,
                token=options.token,
                provider=options.credentials,
                profile=options.profile,
                region=place.region,
            )
        )
        self._region = place.region
        self._skew = 0.0
        """Seconds by which the server's clock is ahead of ours, where that mattered."""

    def call(
        self,
        method: str,
        key: str | None = None,
        query: Mapping[str, str] = {},
        headers: Mapping[str, str] = {},
        body: Body = b"",
        sink: Sink | None = None,
    ) -> Answer:
        """Ask about the object ``key`` (whole, prefix included), or with None about the bucket. Raises ``Failure``."""
        put_right: set[str] = set()
        while True:
            keys = self._credentials.current() if self._credentials is not None else None
            answer = self._send(method, key, query, headers, body, sink, keys)
            failure = _failure(answer, method)
            if failure is None:
                return answer
            remedy = self._remedy(failure, answer, keys)
            if remedy is None or remedy in put_right:
                raise failure
            put_right.add(remedy)

    def _send(
        self,
        method: str,
        key: str | None,
        query: Mapping[str, str],
        headers: Mapping[str, str],
        body: Body,
        sink: Sink | None,
        keys: Credentials | None,
    ) -> Answer:
        path = f"{self._place.base}/{quoted(key, slash=True)}" if key is not None else self._place.base or "/"
        asked = query_string(query)
        whole = {**headers, "host": self._http.host}
        if self._place.options.requester_pays:
            whole["x-amz-request-payer"] = "requester"
        if keys is not None:
            whole = signed_headers(
                method,
                path,
                asked,
                whole,
                payload=self._payload(body),
                credentials=keys,
                region=self._region,
                when=time.time() + self._skew,
            )
        try:
            return self._http.exchange(method, f"{path}?{asked}" if asked else path, whole, body, sink)
        except NoAnswer as error:
            raise Failure(Cause.LOST, str(error)) from error

    def _payload(self, body: Body) -> str:
        nbytes = body_bytes(body)
        if not nbytes:
            return EMPTY
        if nbytes > _SIGNED_BYTES and not self._place.options.sign_payload:
            return UNSIGNED
        digest = hashlib.sha256()
        for piece in pieces_of(body):
            digest.update(piece)
        return digest.hexdigest()

    def _remedy(self, failure: Failure, answer: Answer, keys: Credentials | None) -> str | None:
        """Put right what this request failed of, if that can be; returns what it was."""
        if failure.code == _SKEWED:
            with suppress(TypeError, ValueError):
                self._skew = parsedate_to_datetime(answer.headers["Date"]).timestamp() - time.time()
                return "clock"
        region = answer.headers.get("x-amz-bucket-region") or _text(answer.body, "Region")
        # A HEAD is answered without a body, and so without a code.
        is_elsewhere = failure.code in _WRONG_REGION or answer.status in (301, 307, 400)
        if is_elsewhere and region and region != self._region and _REGION.fullmatch(region):
            # Only the signature changes; AWS answers for all regions of a partition at each of its endpoints' names,
            # or says where to go, which then is for the user to write down.
            self._region = region
            return "region"
        if failure.cause is Cause.DENIED and keys is not None and self._credentials is not None:
            return "keys" if self._credentials.renew(keys) else None
        return None

    def close(self) -> None:
        self._http.close()


def _failure(answer: Answer, method: str) -> Failure | None:
    if 200 <= answer.status < 300:
        return None
    return failure_of(answer, answer.status if method == "HEAD" else 0)


def failure_of(answer: Answer, status: int = 0) -> Failure:
    """What an answer that is an error says. ``status``: there can be no body to say more than this."""
    code = "" if status else _text(answer.body, "Code") or ""
    if answer.status in (301, 307) and code not in _CODES:
        cause = Cause.INVALID
    else:
        cause = _CODES.get(code) or cause_of_status(answer.status)
    if 200 <= answer.status < 300 and cause is Cause.OTHER:
        cause = Cause.BUSY
    message = (_text(answer.body, "Message") or "")[:200]
    request = answer.headers.get("x-amz-request-id")
    words = " ".join(filter(None, [f"HTTP {answer.status}", code, message and f"({message})"]))
    region = answer.headers.get("x-amz-bucket-region")
    if answer.status in (301, 307) and region:
        words += f": the bucket is in the region {region}; give region={region}"
    return Failure(
        cause,
        f"{words} [request {request}]" if request else words,
        status=answer.status,
        code=code,
        retry_after=_seconds(answer.headers.get("Retry-After")),
        size=_total(answer.headers.get("Content-Range")) if cause is Cause.RANGE else None,
    )


def _seconds(value: str | None) -> float | None:
    try:
        return max(0.0, float(value)) if value else None
    except ValueError:
        return None  # a date: no store sends one


def _total(content_range: str | None) -> int | None:
    total = (content_range or "").rpartition("/")[2]
    return int(total) if total.isdecimal() else None


def document(body: bytes) -> Element:
    """The XML of an answer, without namespaces. ``Failure`` where it is none: the answer did not come whole."""
    try:
        return parsed(body)
    except ValueError as error:
        raise Failure(Cause.LOST, f"the answer is no XML to be read: {error}") from error


def _text(body: bytes, tag: str) -> str | None:
    if not body.lstrip().startswith(b"<"):
        return None
    try:
        return document(body).findtext(f".//{tag}")
    except Failure:
        return None
