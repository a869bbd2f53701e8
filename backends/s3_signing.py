"""Requests signed by AWS Signature Version 4, the one that all S3 servers take."""

from __future__ import annotations

import functools
import hashlib
import hmac
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import quote

from ckptfmt.errors import AccessDenied

UNSIGNED: Final = "UNSIGNED-PAYLOAD"
EMPTY: Final = hashlib.sha256(b"").hexdigest()
_ALGORITHM: Final = "AWS4-HMAC-SHA256"


@dataclass(frozen=True)
class Credentials:
    """``expires`` is in seconds since the epoch; None = never. Only ``key``, which is no secret, is shown."""

    key: str
    secret: str = field(repr=False)
    token: str | None = field(default=None, repr=False)
    expires: float | None = None

    def __post_init__(self) -> None:
        """``AccessDenied`` for what no header can hold, which is not told."""
        for name in ("key", "secret", "token"):
            value = getattr(self, name)
            if not (value is None or (isinstance(value, str) and is_plain(value))):
                raise AccessDenied(
                    f"the {name} for S3 holds a blank, a line's end or another character that none has; check where it "
                    "comes from, perhaps a file that was read with its last line's end",
                    kind="no_credentials",
                )


def is_plain(text: str) -> bool:
    """Whether the header of a request can hold ``text`` as it stands."""
    return text.isascii() and text.isprintable() and " " not in text


def quoted(text: str, *, slash: bool = False) -> str:
    """As the signature wants it: everything but letters, digits and ``-._~`` in percent signs."""
    return quote(text, safe="/-._~" if slash else "-._~")


def query_string(query: Mapping[str, str]) -> str:
    """In the order of the names, as it is signed."""
    return "&".join(f"{quoted(name)}={quoted(value)}" for name, value in sorted(query.items()))


def signed_headers(
    method: str,
    path: str,
    query: str,
    headers: Mapping[str, str],
    *,
    payload: str,
    credentials: Credentials,
    region: str,
    when: float,
    service: str = "s3",
) -> dict[str, str]:
    """Return ``headers`` with those that the signature adds.

    ``path`` and ``query`` are quoted already. ``headers`` holds ``host``; it and all ``x-amz-*`` are signed.
    ``payload`` is the SHA-256 of the body in hex digits, or ``UNSIGNED``. ``when`` is in seconds since the epoch.
    """
    moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(when))
    whole = {name.lower(): " ".join(value.split()) for name, value in headers.items()}
    whole |= {"x-amz-date": moment, "x-amz-content-sha256": payload}
    if credentials.token:
        whole["x-amz-security-token"] = credentials.token
    names = sorted(name for name in whole if name == "host" or name.startswith("x-amz-"))
    listed = ";".join(names)
    lines = "".join(f"{name}:{whole[name]}\n" for name in names)
    request = "\n".join([method, path, query, lines, listed, payload])
    scope = f"{moment[:8]}/{region}/{service}/aws4_request"
    text = "\n".join([_ALGORITHM, moment, scope, hashlib.sha256(request.encode()).hexdigest()])
    key = _signing_key(credentials.secret, moment[:8], region, service)
    signature = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
    whole["authorization"] = (
        f"{_ALGORITHM} Credential={credentials.key}/{scope}, SignedHeaders={listed}, Signature={signature}"
    )
    return whole


@functools.lru_cache(maxsize=8)
def _signing_key(secret: str, day: str, region: str, service: str) -> bytes:
    key = f"AWS4{secret}".encode()
    for part in (day, region, service, "aws4_request"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    return key
