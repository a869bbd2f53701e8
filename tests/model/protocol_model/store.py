"""The store: objects that are created once. ``create`` answers as the port says: on return the key holds exactly
these bytes, or it is a conflict.

"In place" is what the posix backend does where there are neither hard links nor an exclusive rename: a dead
writer's beginning is completed by whoever creates the same bytes.
"""

from __future__ import annotations

from typing import Final

from protocol_model import vector as v
from protocol_model.variant import Mutant, Variant

CONFLICT: Final = "conflict"
OK: Final = "ok"


def create_verdict(variant: Variant, s: bytearray, g: int, value: int) -> str:
    """``create`` of COMMIT.json with either verdict."""
    at = v.FOLDERS[g] + v.COMMIT
    beginning = s[at] == v.TORN or s[at] == v.TORN_LONG + value
    if s[at] == 0 or (beginning and variant.mutant is not Mutant.NO_HEALING):
        s[at] = value
    return OK if s[at] == value else CONFLICT


def create_manifest(variant: Variant, s: bytearray, g: int, content: int) -> str:
    folder = v.FOLDERS[g]
    bit = 1 << (content - 1)
    if variant.mutant is Mutant.MANIFEST_FIXED_NAME and (s[folder + v.MANIFESTS] | s[folder + v.TORN_MANIFESTS]) & ~bit:
        return CONFLICT
    if s[folder + v.TORN_MANIFESTS] & bit:
        if variant.mutant is Mutant.NO_HEALING:
            return CONFLICT
        s[folder + v.TORN_MANIFESTS] &= ~bit
    s[folder + v.MANIFESTS] |= bit
    return OK


def create_stone(variant: Variant, s: bytearray, g: int) -> str:
    at = v.FOLDERS[g] + v.STONE
    if s[at] == v.TORN and variant.mutant is Mutant.NO_HEALING:
        return CONFLICT
    s[at] = v.STONE_WHOLE
    return OK


def put(s: bytearray, g: int, kind: int, bit: int) -> None:
    """A pack or a part: one content per rank."""
    s[v.FOLDERS[g] + kind] |= bit


def remove_manifests(s: bytearray, g: int) -> None:
    s[v.FOLDERS[g] + v.MANIFESTS] = 0
    s[v.FOLDERS[g] + v.TORN_MANIFESTS] = 0


def remove_data(s: bytearray, g: int) -> None:
    s[v.FOLDERS[g] + v.PACKS] = 0
    s[v.FOLDERS[g] + v.PARTS] = 0
