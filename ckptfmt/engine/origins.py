"""Which array library each tensor of a generation came from, as the references of its state tell."""

from __future__ import annotations

from functools import cached_property
from typing import Final

from ckptfmt.format.manifest import Manifest

_WORDS: Final = ("tensor", "array")


class Origins:
    """By stored name ``tensor`` (torch) or ``array`` (numpy, bytes).

    The first reference to a tensor decides; an alias counts as the name it is stored under. Never raises: a state
    that cannot be read still has references.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._manifest: Final = manifest
        self._asked = False

    def of(self, stored_name: str) -> str:
        if self._asked:
            return self._by_name.get(stored_name, "array")
        # Whoever asks once reads one tensor: all others are not worth looking at.
        self._asked = True
        names = {stored_name, *(other for other, name in self._manifest.aliases.items() if name == stored_name)}
        return self._manifest.trees.first_tag(names, _WORDS) or "array"

    @cached_property
    def _by_name(self) -> dict[str, str]:
        found: dict[str, str] = {}
        aliases = self._manifest.aliases
        for tag, name in self._manifest.trees.references():
            if tag in _WORDS:
                found.setdefault(aliases.get(name, name), tag)
        return found
