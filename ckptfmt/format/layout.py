"""Object keys: where everything lies below a repository's root.

A key is a relative path of plain ASCII components joined by ``/``. Names of tensors never reach
storage; names of runs only as a slug beside their digest. Only ``parse_commit_hint`` reads a key, and what
it reads is a hint. See spec/format-v1.md, "Layout".
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from typing import Final, NamedTuple

from ckptfmt.errors import FormatError, InvalidInput

MARKER: Final = "ckptfmt.json"
CATALOGS: Final = "catalogs"
RUNS: Final = "runs"
COMMIT: Final = "COMMIT.json"
RETIRED: Final = "RETIRED.json"
TIER: Final = "tier.json"
"""The mark of a stage or a replica, at its root."""

KEY_LENGTH_MAX: Final = 512
COMPONENT_LENGTH_MAX: Final = 200
RUN_NAME_LENGTH_MAX: Final = 200
LAUNCH_TOKEN_LENGTH_MAX: Final = 200
_SLUG_LENGTH_MAX: Final = 40

_COMPONENT = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", re.ASCII)
_GENERATION_KEY = re.compile(r"[0-9a-f]{32}", re.ASCII)
_HINT = re.compile(r"([0-9]{8,20})-([0-9]{12,20})-([0-9a-f]{32})", re.ASCII)
_REPAIR = re.compile(r"repair-[0-9a-f]{32}\.json", re.ASCII)
_CLAIM = re.compile(r"([0-9]{8,20})\.json", re.ASCII)


def run_key(name: str) -> str:
    """Return the folder name of the run called ``name``: a readable slug and 10 hex digits of its SHA-256.

    ``InvalidInput`` for a name that is empty, too long, holds control characters or lone
    surrogates, or one of ``#`` and ``@``, which separate the parts of a reference.
    """
    _check_run_name(name)
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode("ascii").lower()
    slug = re.sub(r"[^a-z0-9]+", "-", plain).strip("-")[:_SLUG_LENGTH_MAX].strip("-")
    mark = hashlib.sha256(name.encode("utf-8")).hexdigest()[:10]
    return f"{slug or 'run'}-{mark}"


def _check_run_name(name: str) -> None:
    if not isinstance(name, str) or not name:
        raise InvalidInput(f"a run's name must be a non-empty string, not {name!r}")
    if len(name) > RUN_NAME_LENGTH_MAX:
        raise InvalidInput(
            f"the run name {name[:40]!r}... has {len(name)} characters; at most {RUN_NAME_LENGTH_MAX} fit"
        )
    bad = sorted({c for c in name if c in "#@" or unicodedata.category(c) in ("Cc", "Cs")})
    if bad:
        raise InvalidInput(f"the run name {name!r} holds {bad}: '#', '@' and control characters are not allowed")


def validate_launch_token(token: str) -> str:
    """Return ``token``. ``InvalidInput`` unless it is 1 to 200 printable ASCII characters without spaces."""
    if not isinstance(token, str) or not re.fullmatch(r"[!-~]+", token) or len(token) > LAUNCH_TOKEN_LENGTH_MAX:
        raise InvalidInput(
            f"the launch token {token!r} must be 1 to {LAUNCH_TOKEN_LENGTH_MAX} printable ASCII characters, no spaces"
        )
    return token


def generation_key(launch_token: str, run_key: str, n: int) -> str:
    """Return the key (32 hex digits) of save number ``n`` of a launch: every rank knows it without asking."""
    if n < 0:
        raise InvalidInput(f"a save number counts from 0, got {n}")
    return _domain_hash(b"ckptfmt generation 1", validate_launch_token(launch_token), run_key, str(n))


def launch_digest(launch_token: str) -> str:
    """Return what manifests and parts record of a launch (32 hex digits): the token itself stays out of storage."""
    return _domain_hash(b"ckptfmt launch 1", validate_launch_token(launch_token))


def _domain_hash(domain: bytes, *fields: str) -> str:
    # Length prefixes keep ("a", "bc") and ("ab", "c") apart.
    state = hashlib.sha256(domain)
    for field in fields:
        raw = field.encode("utf-8")
        state.update(len(raw).to_bytes(8, "little") + raw)
    return state.hexdigest()[:32]


def validate_generation_key(key: str) -> str:
    """Return ``key``. ``FormatError`` unless it is 32 lower-case hex digits."""
    if not isinstance(key, str) or not _GENERATION_KEY.fullmatch(key):
        raise FormatError(f"{key!r} is no generation key (32 lower-case hex digits)")
    return key


def catalog_claim(epoch: int) -> str:
    """Key of the object that says which catalog governs the repository from ``epoch`` (>= 1) on."""
    if epoch < 1:
        raise InvalidInput(f"catalog epochs count from 1, got {epoch}")
    return f"{CATALOGS}/{epoch:08d}.json"


def parse_catalog_claim(name: str) -> int | None:
    """Return the epoch of an object name in the folder ``catalogs``, or None if it is none."""
    found = _CLAIM.fullmatch(name)
    return int(found[1]) if found else None


def run_folder(run_key: str) -> str:
    return f"{RUNS}/{run_key}"


def generation_folder(run_key: str, key: str) -> str:
    return f"{RUNS}/{run_key}/{key}"


def commits_folder(run_key: str) -> str:
    return f"{RUNS}/{run_key}/commits"


def commit_hint(run_key: str, epoch: int, seq: int, key: str) -> str:
    """Key of the empty object that lets one listing find the latest commits. Sorts by (epoch, seq)."""
    return f"{commits_folder(run_key)}/{epoch:08d}-{seq:012d}-{key}"


class CommitHint(NamedTuple):
    """Order and key as a hint claims them; only COMMIT.json proves them."""

    epoch: int
    seq: int
    key: str


def parse_commit_hint(name: str) -> CommitHint | None:
    """Return what the object name (not key) of a commit hint claims, or None if it is none."""
    found = _HINT.fullmatch(name)
    return CommitHint(int(found[1]), int(found[2]), found[3]) if found else None


def repaired_pack_name(name: str, attempt: int) -> str:
    """Name of an object with the bytes of the pack called ``name``, where that one is damaged: one for each attempt."""
    stem = name.removesuffix(".safetensors")
    return f"{stem}-r{attempt}.safetensors"


def pack_name(rank: int, index: int, attempt: int = 0) -> str:
    """Name of a pack in its generation's folder. A pack rewritten after an error gets the next ``attempt``."""
    return f"r{rank:05d}-p{index:03d}{_attempt(attempt)}.safetensors"


def part_name(rank: int, attempt: int = 0) -> str:
    return f"r{rank:05d}{_attempt(attempt)}.part.json"


def staged_part_name(rank: int, attempt: int = 0) -> str:
    """Name of the part as it lies on a stage: all packs of the rank are there too. It acknowledges nothing."""
    return f"r{rank:05d}{_attempt(attempt)}.staged.json"


def is_of_rank(name: str, rank: int) -> bool:
    """Whether an object name is that of a pack or a part, staged or not, of ``rank``."""
    return name.startswith((f"r{rank:05d}-", f"r{rank:05d}."))


def _attempt(attempt: int) -> str:
    return f"-a{attempt}" if attempt else ""


def manifest_name(digest_hex: str) -> str:
    """Name of the manifest whose stored bytes have this digest."""
    return f"manifest-{digest_hex}.json.zst"


def repair_name(digest_hex: str) -> str:
    """Name of the repair whose stored bytes have this digest."""
    return f"repair-{digest_hex}.json"


def is_repair(name: str) -> bool:
    """Whether an object name is that of a repair."""
    return _REPAIR.fullmatch(name) is not None


def ocdbt_nodes_name(token: str) -> str:
    """Name of the nodes of a generation's OCDBT database; ``token`` is the writer's own."""
    return f"ocdbt-{token}.nodes"


def ocdbt_copies_name(token: str) -> str:
    """Name of the chunks in a generation's OCDBT database that are no range of a pack."""
    return f"ocdbt-{token}.copies"


def validate_key(key: str) -> str:
    """Return ``key``. ``InvalidInput`` unless it is a relative path of plain components (see the module)."""
    if not isinstance(key, str) or len(key) > KEY_LENGTH_MAX or not all(map(_is_plain, key.split("/"))):
        raise InvalidInput(
            f"the object key {str(key)[:120]!r} must be a relative path of components of A-Z a-z 0-9 . _ - that "
            f"don't begin with a dot, at most {COMPONENT_LENGTH_MAX} characters each and {KEY_LENGTH_MAX} in all"
        )
    return key


def validate_plain_name(name: str) -> str:
    """Return ``name``, an object name read from bytes. ``FormatError`` unless it is one plain component."""
    if not isinstance(name, str) or not _is_plain(name):
        raise FormatError(f"the object name {str(name)[:120]!r} is not a plain name within one folder")
    return name


def _is_plain(component: str) -> bool:
    return len(component) <= COMPONENT_LENGTH_MAX and _COMPONENT.fullmatch(component) is not None
