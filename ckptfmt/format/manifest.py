"""The manifest: what a whole generation holds and where each byte of it lies.

A zstd frame of compact JSON. ``decode_manifest`` validates everything as a whole before anybody
uses any of it. See spec/format-v1.md, "Manifest".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from operator import mul
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
import zstandard

from ckptfmt.errors import FormatError, InvalidInput, UnsupportedVersion, Unverifiable
from ckptfmt.format import checksum, extents, strict_json, tables, written
from ckptfmt.format.tables import BoxTable, PackRow, TensorTable
from ckptfmt.format.tree_walk import marks as find_marks
from ckptfmt.format.tree_walk import parse_node
from ckptfmt.format.trees import Trees, TreeTexts, check_references
from ckptfmt.format.verdict import VERSION, Count, Hex128, Positive, Time, Uuid

JSON_BYTES_MAX: Final = 1 << 30
"""Of the text: some 13 million boxes."""
MANIFEST_BYTES_MAX: Final = 256 << 20
"""Of the stored bytes, which are hardly compressed where they are digests."""
_ALWAYS_FINE_BYTES: Final = 16 << 20
_RATIO_MAX: Final = 256
"""Beyond 16 MiB a frame that claims to unpack to more times its own size is taken for a bomb."""
_QUICK_BYTES: Final = 1 << 20
"""From here on most of a manifest are digests: zstd's level 3 takes four times as long as level 1, and saves nothing or
next to nothing."""
READ_FEATURES: Final[frozenset[str]] = frozenset()
"""Features beyond version 1 that this library can read."""


class RankRow(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of the launch, whether it saved or not.

    ``mesh`` is where it stands in the device mesh: dimension's name (its number, if it has none) -> coordinate. None
    for a rank that saved nothing of a mesh, or not at all.
    """

    rank: Count
    mesh: dict[str, Count] | None = None


class Writer(msgspec.Struct, frozen=True, kw_only=True):
    """The library that wrote, for people."""

    library: str
    version: str


class Shared(msgspec.Struct, kw_only=True):
    """What manifests and parts have in common. ``created_at`` is when the snapshot was frozen (RFC 3339 UTC)."""

    format: Literal["ckptfmt"] = "ckptfmt"
    object: str
    version: Positive = VERSION
    read_features: list[str] = []
    write_features: list[str] = []
    key: Hex128
    step: Annotated[int, msgspec.Meta(ge=-(2**62), le=2**62)]
    launch: Hex128
    """``layout.launch_digest`` of the launch's token."""
    save_number: Count
    created_at: Time
    writer: Writer
    digest_algorithm: str = checksum.ALGORITHM
    chunk_bytes: Positive = checksum.CHUNK_BYTES
    packs: list[PackRow] = []
    tensors: TensorTable = msgspec.field(default_factory=TensorTable)
    boxes: BoxTable = msgspec.field(default_factory=BoxTable)
    aliases: dict[str, str] = {}
    """Other names of tensors: name -> the name under which it is stored."""
    metadata: Any = None
    """The user's own facts, as a state tree without tensors."""
    tiers: list[Uuid] | msgspec.UnsetType = msgspec.UNSET
    """The tiers beside the durable one that held the packs when this was written. Unset: none was asked for."""


SharedT = TypeVar("SharedT", bound=Shared)


class Manifest(Shared, kw_only=True):
    """A whole generation. ``parent`` is the key of the generation that this one continued."""

    object: Literal["manifest"] = "manifest"
    repository: Uuid
    run: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    id: Positive
    parent: Hex128 | None = None
    ranks: list[RankRow] = []
    trees: Trees = msgspec.field(default_factory=Trees)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, each counted once: their boxes tile them."""
        return sum(map(mul, map(prod, self.tensors.shape), tables.itemsizes(self.tensors)))


@dataclass(frozen=True)
class Sound:
    """A manifest that ``validate`` has passed and nobody has changed since. Only such a one is ever written."""

    manifest: Manifest


def encode_sound(sound: Sound) -> bytes:
    """Return the stored bytes of a manifest. ``FormatError`` for one so large that readers would refuse it."""
    text = to_json(sound.manifest, "the manifest")
    level = 1 if len(text) >= _QUICK_BYTES else 3
    stored = zstandard.ZstdCompressor(level=level, write_checksum=False).compress(text)
    if _is_absurd(len(text), len(stored)) or len(stored) > MANIFEST_BYTES_MAX:
        manifest = sound.manifest
        raise FormatError(
            f"the manifest of generation {manifest.key} is too large to be read again: {len(manifest.boxes.tensor)} "
            f"boxes of {len(manifest.tensors.name)} tensors and the state's other values take {len(text)} bytes, "
            f"{len(stored)} compressed; spread each tensor over fewer ranks, and put long lists into tensors"
        )
    return stored


def _is_absurd(text_bytes: int, stored_bytes: int) -> bool:
    """Whether so large a text is not to be unpacked from so few bytes."""
    if text_bytes > JSON_BYTES_MAX:
        return True
    return text_bytes > _ALWAYS_FINE_BYTES and text_bytes > _RATIO_MAX * stored_bytes


def to_json(value: msgspec.Struct, what: str) -> bytes:
    """Return compact JSON. ``InvalidInput`` for text that is no valid Unicode and numbers beyond 64 bits."""
    try:
        return msgspec.json.encode(value)
    except (UnicodeEncodeError, OverflowError, TypeError, RecursionError) as error:
        raise InvalidInput(f"{what} can't be written as JSON: {error}") from error


def manifest_digest(stored: bytes) -> str:
    """Return the hex digest of a manifest's stored bytes, which names it."""
    return checksum.hex_digest(stored)


def decode_manifest(stored: bytes) -> Manifest:
    """Return a manifest after checking all of it.

    ``UnsupportedVersion`` for what a newer version wrote, ``Unverifiable`` for unknown digests,
    other ``FormatError`` for everything that is not whole and sound.
    """
    text = _decompress(stored)
    return validate(read_exact(text, Manifest) or _read(text, "the manifest")).manifest


def read_exact(text: bytes, type_: type[SharedT]) -> SharedT | None:
    """Return what stands in a text that this version of the format could have written. None for any other text:
    it may be sound, or newer, and is to be read member by member (``read_shared``)."""
    value = written.read(text, type_)
    if value is None or value.version > VERSION or value.digest_algorithm != checksum.ALGORITHM:
        return None
    return value if READ_FEATURES.issuperset(value.read_features) else None


def _read(text: bytes, what: str) -> Manifest:
    fields = read_shared(text, what, nodes=("trees",))
    fields["trees"] = _read_trees(fields.get("trees"), what)
    return build(fields, Manifest, what)


def _read_trees(raw: msgspec.Raw | None, what: str) -> Trees:
    trees = Trees()
    members = strict_json.members(bytes(raw), f"{what}'s trees") if raw is not None else {}
    if "common" in members:
        trees.common = parse_node(bytes(members["common"]), f"{what}'s state")
    if "per_rank" in members:
        for rank, slots in strict_json.members(bytes(members["per_rank"]), f"{what}'s per-rank trees").items():
            trees.per_rank[rank] = read_slots(slots, f"{what}'s tree of rank {rank}")
    return trees


def read_slots(raw: msgspec.Raw, what: str) -> dict[str, Any]:
    """Return one rank's nodes by slot."""
    return {slot: parse_node(bytes(text), what) for slot, text in strict_json.members(bytes(raw), what).items()}


def _decompress(stored: bytes) -> bytes:
    try:
        size = zstandard.get_frame_parameters(stored).content_size
        if _is_absurd(size, len(stored)):
            # An unknown size reads as 2**64 - 1.
            raise FormatError(f"the manifest claims to unpack from {len(stored)} to {size} bytes: refused")
        text = zstandard.ZstdDecompressor().decompress(stored, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise FormatError(f"the manifest is no whole zstd frame: {error}") from error
    if len(text) != size:
        raise FormatError(f"the manifest unpacks to {len(text)} bytes where {size} were announced")
    return text


_TABLES: Final[dict[str, type]] = {"tensors": TensorTable, "boxes": BoxTable, "claims": tables.ClaimTable}


def read_shared(text: bytes, what: str, nodes: Collection[str]) -> dict[str, Any]:
    """Return the members of a manifest's or part's JSON: large tables decoded, members called ``nodes`` left raw,
    the rest as plain JSON.

    Version, features and digest algorithm are checked first, so that a newer object is called newer.
    """
    raw = strict_json.members(text, what)
    plain = raw.keys() - _TABLES.keys() - set(nodes)
    fields: dict[str, Any] = {name: strict_json.parse(bytes(raw[name]), what) for name in plain}
    if fields.get("format") != "ckptfmt":
        raise FormatError(f"{what} is no object of this format")
    missing = {"object", "version"} - fields.keys()
    if missing:
        raise FormatError(f"{what} lacks the members {sorted(missing)}")
    version = fields.get("version")
    if type(version) is int and version > VERSION:
        raise UnsupportedVersion(
            f"{what} is of format version {version}; this ckptfmt reads up to {VERSION}: upgrade it"
        )
    features = fields.get("read_features", [])
    if isinstance(features, list) and not READ_FEATURES.issuperset(map(str, features)):
        unknown = sorted(set(map(str, features)) - READ_FEATURES)
        raise UnsupportedVersion(f"{what} needs the features {unknown}, unknown here: upgrade ckptfmt")
    if fields.get("digest_algorithm") != checksum.ALGORITHM:
        raise Unverifiable(
            f"{what} has digests of the algorithm {fields.get('digest_algorithm')!r}; this ckptfmt knows "
            f"{checksum.ALGORITHM} only"
        )
    for name in raw.keys() & _TABLES.keys():
        strict_json.members(bytes(raw[name]), f"{what}'s {name}")
        fields[name] = strict_json.decode(raw[name], _TABLES[name], f"{what}'s {name}")
    return fields | {name: raw[name] for name in nodes if name in raw}


def build(fields: Mapping[str, Any], type_: type[strict_json.T], what: str) -> strict_json.T:
    """Return the Struct of ``fields``, whose tables are decoded already; unknown members are ignored."""
    return strict_json.convert(dict(fields), type_, what)


def validate(manifest: Manifest) -> Sound:
    """Check a manifest as a whole and vouch for it. ``FormatError`` names the tensor, pack or path that doesn't fit."""
    what = f"the manifest of generation {manifest.key}"
    tensors, boxes = manifest.tensors, manifest.boxes
    tensor_bytes, names = check_shared(manifest, what)
    sizes = tables.check_boxes(tensors, boxes, tensor_bytes, manifest.chunk_bytes, what, tiled=True)
    extents.check_extents(tensors, boxes, sizes.nbytes, manifest.packs, what)
    if not sizes.whole:
        tables.check_tilings(tensors, boxes, manifest.packs, what)
    ranks = [row.rank for row in manifest.ranks]
    if ranks != list(range(len(ranks))) or not ranks:
        raise FormatError(f"{what}: its ranks are {ranks[:8]}, not 0, 1, 2, ...")
    if max(tensors.rank, default=-1) >= len(ranks):
        raise FormatError(f"{what}: a tensor belongs to a rank that does not exist")
    owners = manifest.trees.slot_texts() if isinstance(manifest.trees, TreeTexts) else manifest.trees.per_rank
    if not {str(rank) for rank in ranks}.issuperset(owners):
        raise FormatError(f"{what}: a per-rank tree belongs to a rank that does not exist")
    check_references(manifest.trees, names, what)
    return Sound(manifest)


def check_shared(value: Shared, what: str) -> tuple[list[int], Mapping[str, object]]:
    """Check what manifests and parts share, boxes aside; return the bytes of each tensor, and the names (the keys) that
    trees may refer to."""
    names: dict[str, str | None] = dict.fromkeys(value.tensors.name)  # of half a set's size: all memory is new here
    tensor_bytes = tables.check_tensors(value.tensors, len(names), what)
    tables.check_packs(value.packs, what)
    tables.check_aliases(names, value.aliases, what)
    if find_marks(value.metadata):
        raise FormatError(f"{what}: its metadata refers to tensors or ranks")
    names.update(value.aliases)
    return tensor_bytes, names
