"""What a URL and ``storage_options`` say of a place on S3."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal
from urllib.parse import parse_qsl, quote, unquote, urlsplit

import msgspec

from ckptfmt.backends.discreet_options import DiscreetOptions, chosen
from ckptfmt.backends.endpoints import checked_endpoint
from ckptfmt.backends.http_client import is_this_machine
from ckptfmt.backends.object_retry import Patience
from ckptfmt.backends.s3_credentials import profile_settings
from ckptfmt.backends.s3_signing import is_plain
from ckptfmt.errors import InvalidInput

_BUCKET: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
PART_BYTES_MIN: Final = 5 << 20
PART_BYTES_MAX: Final = 512 << 20


class S3Options(DiscreetOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``storage_options`` of an ``s3://`` repository; those without secrets may stand in the URL's query as well."""

    key: str | None = None
    """Access key id. None = the environment, a profile, or the machine's role."""
    secret: str | None = None
    token: str | None = None
    """Session token of temporary keys."""
    credentials: Any = None
    """A callable that returns a mapping with ``key``, ``secret`` and perhaps ``token`` and ``expires_at``; asked again
    before they expire, and when the server refuses them."""
    profile: str | None = None
    """A profile of ``~/.aws``."""
    anon: bool = False
    """Requests are not signed: public buckets."""
    endpoint: str | None = None
    """URL of the server; None = ``$AWS_ENDPOINT_URL_S3``, ``$AWS_ENDPOINT_URL``, or AWS."""
    region: str | None = None
    addressing: Literal["auto", "path", "virtual"] = "auto"
    """Where the bucket's name stands: in the path or in the host's name. auto = path but on AWS."""
    allow_http: bool = False
    """Let an ``http://`` endpoint be one on another machine."""
    verify: bool | str = True
    """Of the server's certificate; or the file of the authorities that are trusted."""
    timeout: float = 60.0
    """Seconds of silence after which a request is given up."""
    connect_timeout: float = 10.0
    retry_attempts: int = 10
    retry_seconds: float = 120.0
    part_bytes: int = 8 << 20
    """Of the parts of an upload, at least: those of a snapshot are larger where it is large enough."""
    sign_payload: bool = False
    """Sign the bytes of packs too. Their CRC-32 is always signed, and so are the bytes of small objects."""
    requester_pays: bool = False
    server_side_encryption: str | None = None
    sse_kms_key_id: str | None = None
    storage_class: str | None = None
    upload_grace: float = 3600.0
    """Seconds after which a multipart upload that nobody finished is swept."""
    single_writer: bool = False
    """Write to a server that overwrites although it is told not to: no two launches ever write here at one time."""


_ALIASES: Final = {
    "endpoint_url": "endpoint",
    "access_key_id": "key",
    "aws_access_key_id": "key",
    "username": "key",
    "secret_access_key": "secret",
    "aws_secret_access_key": "secret",
    "password": "secret",
    "session_token": "token",
    "aws_session_token": "token",
    "region_name": "region",
    "aws_region": "region",
    "addressing_style": "addressing",
    "skip_signature": "anon",
    "credential_provider": "credentials",
    "request_payer": "requester_pays",
}
"""Names that users of fsspec, s3fs, boto3 and obstore know."""
_SECRET: Final = frozenset({"key", "secret", "token", "credentials"})
_VERIFY: Final = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True)
class S3Place:
    """A bucket and a prefix in it, with everything that it takes to reach them."""

    bucket: str
    prefix: str
    """Without a slash at either end; '' is the bucket itself."""
    endpoint: str
    """``scheme://host[:port]``, the bucket's name included where it belongs there."""
    base: str
    """Path of the bucket on the endpoint, quoted: '' or ``/bucket``."""
    region: str
    url: str
    """For people and for the catalog: what leads here again, and no secrets."""
    options: S3Options

    @property
    def beside_url(self) -> dict[str, Any]:
        """What leads here again beside ``url``; no secrets either."""
        told = dict(parse_qsl(self.url.partition("?")[2]))
        found = {name: value for name, value in chosen(self.options).items() if name not in told}
        return {**found, "region": self.region}


def parse_options(given: Mapping[str, Any] | None) -> S3Options:
    """``InvalidInput`` for an unknown name, listing the known ones; never with a value, which may be a secret."""
    named: dict[str, Any] = {}
    for name, value in _flattened(given or {}).items():
        field = _ALIASES.get(name, name)
        if field in named:
            raise InvalidInput(f"storage_options for s3://: {name} says again what {field} says; give one of them")
        named[field] = value
    fields = [field.name for field in msgspec.structs.fields(S3Options)]
    if unknown := sorted(set(named) - set(fields)):
        raise InvalidInput(
            f"storage_options for s3://: unknown {', '.join(unknown)}; known are: {', '.join(fields)}; and as other "
            f"names of these: {', '.join(sorted(_ALIASES))}"
        )
    try:
        if isinstance(word := named.get("verify"), str):
            if not word:
                raise InvalidInput("verify='': give true, or the file of the authorities that are trusted")
            named["verify"] = _VERIFY.get(word.lower(), word)  # in a URL everything is text
        options: S3Options = msgspec.convert(named, S3Options, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"storage_options for s3://: {error}; known are: {', '.join(fields)}") from None
    return _checked(options)


def _flattened(given: Mapping[str, Any]) -> dict[str, Any]:
    """s3fs takes what it hands on to botocore in ``client_kwargs``."""
    flat = {str(name): value for name, value in given.items() if name != "client_kwargs"}
    inner = given.get("client_kwargs") or {}
    if not isinstance(inner, Mapping):
        raise InvalidInput("storage_options for s3://: client_kwargs must be a mapping")
    return flat | {str(name): value for name, value in inner.items()}


def _checked(options: S3Options) -> S3Options:
    Patience(options.retry_attempts, options.retry_seconds)
    for name in ("timeout", "connect_timeout"):
        if not 0 < getattr(options, name) < 86400:
            raise InvalidInput(f"{name}={getattr(options, name)}: give more than 0 and at most 86400 seconds")
    if not PART_BYTES_MIN <= options.part_bytes <= PART_BYTES_MAX:
        raise InvalidInput(f"part_bytes={options.part_bytes}: give {PART_BYTES_MIN} to {PART_BYTES_MAX} bytes")
    if not 0 <= options.upload_grace < float("inf"):
        raise InvalidInput(f"upload_grace={options.upload_grace}: give 0 or more seconds")
    for name in ("server_side_encryption", "sse_kms_key_id", "storage_class"):
        value = getattr(options, name)
        if not (value is None or (value and is_plain(value))):
            raise InvalidInput(f"{name}={value!r}: give a word of letters, digits and signs")
    if options.credentials is not None and not callable(options.credentials):
        raise InvalidInput("storage_options for s3://: credentials must be callable; give keys as key= and secret=")
    return options


def parse_place(url: str, given: Mapping[str, Any] | None = None) -> S3Place:
    """Return what ``s3://bucket/prefix?option=value`` and ``storage_options`` name."""
    shown = url.partition("?")[0]
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise InvalidInput(f"an s3:// URL: {error}; give s3://bucket/prefix") from None
    if "@" in parts.netloc:
        raise InvalidInput("an s3:// URL holds no keys: they would be logged; give key= and secret= in storage_options")
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    for name in query:
        if _ALIASES.get(name, name) in _SECRET:
            raise InvalidInput(f"{shown}: {name} may not stand in a URL, which is logged; give it in storage_options")
    both = sorted({_ALIASES.get(name, name) for name in query} & {_ALIASES.get(name, name) for name in given or {}})
    if both:
        raise InvalidInput(f"{shown}: {', '.join(both)} stands in the URL and in storage_options; give it once")
    options = parse_options({**query, **(given or {})})
    bucket = parts.netloc
    if not _BUCKET.fullmatch(bucket):
        raise InvalidInput(f"{shown}: {bucket!r} is no bucket's name; give s3://bucket/prefix")
    prefix = _prefix(unquote(parts.path), shown)
    settings = profile_settings(options.profile)
    region = _region(options, settings)
    named = _endpoint(options, settings)
    return _place(bucket, prefix, named, region, options)


def _prefix(path: str, shown: str) -> str:
    components = [component for component in path.strip("/").split("/") if component] if path.strip("/") else []
    if any(component in (".", "..") or not component.isprintable() for component in components):
        raise InvalidInput(f"{shown}: '.', '..' and control characters have no place in a prefix")
    return "/".join(components)


def _region(options: S3Options, settings: Mapping[str, str]) -> str:
    found = options.region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    region = found or settings.get("region") or "us-east-1"
    if not re.fullmatch(r"[A-Za-z0-9-]+", region):
        raise InvalidInput(f"region={region!r} is no region's name")
    return region


def _endpoint(options: S3Options, settings: Mapping[str, str]) -> str | None:
    """The server that is named somewhere, checked; None = AWS."""
    variables = (os.environ.get("AWS_ENDPOINT_URL_S3"), os.environ.get("AWS_ENDPOINT_URL"))
    named = options.endpoint or next(filter(None, variables), None) or settings.get("endpoint_url")
    if not named:
        return None
    parts = checked_endpoint(named)
    if parts.path.strip("/"):
        raise InvalidInput(
            f"endpoint={parts.scheme}://{parts.hostname}: give http(s)://host[:port] and nothing behind it"
        )
    if parts.scheme == "http" and not options.allow_http and not is_this_machine(parts.hostname or ""):
        raise InvalidInput(
            f"endpoint={named}: without TLS anybody on the way can read and change checkpoints; use https://, or say "
            "allow_http=true"
        )
    return f"{parts.scheme}://{parts.netloc}"


def _place(bucket: str, prefix: str, named: str | None, region: str, options: S3Options) -> S3Place:
    suffix = "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"
    endpoint = named or f"https://s3.{region}.{suffix}"
    # A dot in a bucket's name would make another level of the host's, for which there is no certificate.
    virtual = options.addressing == "virtual" or (options.addressing == "auto" and not named and "." not in bucket)
    url = "s3://" + quote(f"{bucket}/{prefix}" if prefix else bucket)
    if named:
        queries = [f"endpoint={quote(named, safe=':/')}"]
        if named.startswith("http:") and not is_this_machine(urlsplit(named).hostname or ""):
            queries.append("allow_http=true")
        if options.addressing == "virtual":
            queries.append("addressing=virtual")
        url += "?" + "&".join(queries)
    scheme, _, host = endpoint.partition("://")
    at = f"{scheme}://{bucket}.{host}" if virtual else endpoint
    return S3Place(bucket, prefix, at, "" if virtual else f"/{quote(bucket)}", region, url, options)
