"""The small objects that decide: marker, catalog claim, commit record, tombstone; mark of a tier, repair.

Each is one line of JSON that ends in a digest over everything before it, so that a torn or damaged
one is never taken at its word. Encoding is a pure function of the fields: the same row gives the
same bytes, hence a repeated create is a success. See spec/format-v1.md, "Verdicts".
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated, Final, Literal, TypeVar

import msgspec

from ckptfmt.errors import Corrupt, FormatError, InvalidInput, UnsupportedVersion
from ckptfmt.format import checksum, strict_json
from ckptfmt.format.layout import run_key, validate_plain_name

FORMAT: Final = "ckptfmt"
VERSION: Final = 1
BYTES_MAX: Final = 64 << 10
"""No object of this module is larger."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=2**62)]
Hex128 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
Uuid = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\Z")]
Time = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,6})?Z\Z")]
"""RFC 3339, UTC, at most microseconds."""


class _Object(msgspec.Struct, frozen=True, kw_only=True):
    format: Literal["ckptfmt"] = "ckptfmt"
    version: Positive = VERSION


class Marker(_Object, frozen=True, kw_only=True):
    """``ckptfmt.json``: this folder is a repository."""

    object: Literal["repository"] = "repository"
    repository: Uuid
    created_at: Time


class CatalogClaim(_Object, frozen=True, kw_only=True):
    """``catalogs/<epoch>.json``: the catalog that governs the repository; the highest epoch wins."""

    object: Literal["catalog"] = "catalog"
    repository: Uuid
    catalog: Uuid
    epoch: Positive
    location: Literal["embedded", "external"]


class ManifestRef(msgspec.Struct, frozen=True, kw_only=True):
    """A manifest in the generation's folder: its name, and digest and length of its stored bytes."""

    name: str
    digest: Hex128
    bytes: Positive


class Commit(_Object, frozen=True, kw_only=True):
    """``COMMIT.json``: the verdict on a generation.

    ``committed`` carries manifest, commit_seq and committed_at, ``aborted`` a reason. ``parent`` is
    the key of the generation that this one continued, ``fence`` that of the launch that committed.
    ``tiers`` are the tiers beside the durable one that held all packs by then; it is left out where there are none.
    """

    object: Literal["commit"] = "commit"
    verdict: Literal["committed", "aborted"]
    repository: Uuid
    epoch: Positive
    run: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    id: Positive
    key: Hex128
    step: Annotated[int, msgspec.Meta(ge=-(2**62), le=2**62)]
    commit_seq: Positive | None = None
    parent: Hex128 | None = None
    fence: Count
    manifest: ManifestRef | None = None
    committed_at: Time | None = None
    reason: Annotated[str, msgspec.Meta(max_length=4000)] | None = None
    tiers: Annotated[tuple[Uuid, ...], msgspec.Meta(min_length=1, max_length=64)] | msgspec.UnsetType = msgspec.UNSET


class Retired(_Object, frozen=True, kw_only=True):
    """``RETIRED.json``: the tombstone. The generation is committed no longer and its bytes may go at any time."""

    object: Literal["retired"] = "retired"
    repository: Uuid
    run: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    id: Positive
    key: Hex128
    retired_at: Time


class TierMark(_Object, frozen=True, kw_only=True):
    """``tier.json``: this folder is a stage or a replica of a repository. A stage is of use on ``host`` only."""

    object: Literal["tier"] = "tier"
    tier: Uuid
    role: Literal["stage", "replica"]
    repository: Uuid
    host: Annotated[str, msgspec.Meta(min_length=1, max_length=255)] | None = None
    created_at: Time


class Repair(_Object, frozen=True, kw_only=True):
    """``repair-<digest>.json``: on this tier other objects stand in for packs of a generation that are damaged or gone.

    ``packs``: name of the pack -> name of the object that has its bytes, both in the folder of generation ``key``.
    """

    object: Literal["repair"] = "repair"
    repository: Uuid
    key: Hex128
    packs: dict[str, str]


AnyObject = TypeVar("AnyObject", Marker, CatalogClaim, Commit, Retired, TierMark, Repair)

_OPTIONAL: Final = frozenset({"tiers"})
"""Members that are left out where they say nothing: those that came after the first release."""
_SEAL = re.compile(rb',"self_digest":"([0-9a-f]{32})"\}\n')
_SEAL_BYTES = len(b',"self_digest":""}\n') + checksum.HEX_DIGITS


def encode_marker(value: Marker) -> bytes:
    return _encode(value)


def encode_claim(value: CatalogClaim) -> bytes:
    return _encode(value)


def encode_commit(value: Commit) -> bytes:
    return _encode(value)


def encode_retired(value: Retired) -> bytes:
    return _encode(value)


def encode_tier_mark(value: TierMark) -> bytes:
    return _encode(value)


def encode_repair(value: Repair) -> bytes:
    return _encode(value)


def decode_marker(data: bytes) -> Marker:
    return _decode(data, Marker, "the repository marker")


def decode_claim(data: bytes) -> CatalogClaim:
    return _decode(data, CatalogClaim, "the catalog claim")


def decode_commit(data: bytes) -> Commit:
    """Return a verified commit record. ``Corrupt`` if its digest doesn't hold, ``UnsupportedVersion`` if it is newer,
    else ``FormatError`` if it is no commit record, also for a name that no run can have."""
    return _decode(data, Commit, "the commit record")


def decode_retired(data: bytes) -> Retired:
    return _decode(data, Retired, "the tombstone")


def decode_tier_mark(data: bytes) -> TierMark:
    return _decode(data, TierMark, "the mark of the tier")


def decode_repair(data: bytes) -> Repair:
    return _decode(data, Repair, "the repair")


def tiers_of(value: Commit) -> tuple[str, ...]:
    """The tiers beside the durable one that held all packs when the verdict was given."""
    return () if isinstance(value.tiers, msgspec.UnsetType) else value.tiers


def timestamp(moment: datetime) -> str:
    """Return an aware time as these objects write it: UTC, microseconds, ``Z``. ``InvalidInput`` if it is naive."""
    if moment.tzinfo is None:
        raise InvalidInput(f"the time {moment} has no time zone; give it one")
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _encode(value: msgspec.Struct) -> bytes:
    body = msgspec.json.encode(value)[:-1]
    data = body + f',"self_digest":"{checksum.hex_digest(body)}"}}\n'.encode("ascii")
    try:  # what a reader would refuse must not become a durable object
        _decode(data, type(value), f"the new {type(value).__name__} object")  # type: ignore[type-var]
    except FormatError as error:
        raise InvalidInput(str(error)) from error
    return data


def _decode(data: bytes, type_: type[AnyObject], what: str) -> AnyObject:
    if len(data) > BYTES_MAX:
        raise FormatError(f"{what} has {len(data)} bytes; at most {BYTES_MAX} are read")
    seal = _SEAL.fullmatch(data[-_SEAL_BYTES:])
    if seal is None:
        raise Corrupt(f"{what} does not end in its digest: it is torn, or no object of this format")
    if checksum.hex_digest(data[:-_SEAL_BYTES]).encode("ascii") != seal[1]:
        raise Corrupt(f"{what} differs from its own digest")
    value = strict_json.parse(data, what)
    version = value.get("version") if isinstance(value, dict) else None
    if value.get("format") == FORMAT and isinstance(version, int) and version > VERSION:
        raise UnsupportedVersion(
            f"{what} is of format version {version}; this ckptfmt reads up to {VERSION}: upgrade it"
        )
    missing = [name for name in type_.__struct_fields__ if name not in value and name not in _OPTIONAL]
    if missing:  # nothing goes without saying, not even the version
        raise FormatError(f"{what} lacks the members {missing}")
    found = strict_json.convert(value, type_, what)
    if isinstance(found, TierMark) and found.role == "stage" and found.host is None:
        raise FormatError(f"{what} is that of a stage of no host")
    if isinstance(found, Repair):
        _check_repair(found, what)
    if isinstance(found, Commit | Retired):
        _check_run(found, what)
    if isinstance(found, Commit):
        _check_commit(found, what)
    return found


def _check_run(value: Commit | Retired, what: str) -> None:
    try:
        run_key(value.run)
    except InvalidInput as error:
        raise FormatError(f"{what} is of no run: {error}") from error


def _check_repair(value: Repair, what: str) -> None:
    if not value.packs:
        raise FormatError(f"{what} names no pack")
    for old, new in value.packs.items():
        if validate_plain_name(new) in value.packs or validate_plain_name(old) == new:
            raise FormatError(f"{what} names {new!r} both as damaged and as whole")
    if len(set(value.packs.values())) != len(value.packs):
        raise FormatError(f"{what} puts one object in the place of several packs")


def _check_commit(value: Commit, what: str) -> None:
    facts = (value.manifest, value.commit_seq, value.committed_at)
    if value.verdict == "committed" and (None in facts or value.reason is not None):
        raise FormatError(f"{what} says committed without manifest, commit_seq and committed_at, or with a reason")
    if value.verdict == "aborted" and (facts != (None, None, None) or value.reason is None or tiers_of(value)):
        raise FormatError(f"{what} says aborted without a reason, or with what only a committed generation has")
    if list(tiers_of(value)) != sorted(set(tiers_of(value))):
        raise FormatError(f"{what} names tiers twice or out of order")
    if value.manifest is not None:
        validate_plain_name(value.manifest.name)
