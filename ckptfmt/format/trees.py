"""The state trees of one manifest: values, or texts of which most are never looked at.

Who reads one tensor by its name needs no tree, and a tree costs more than all else in a manifest: two objects for
every value. So texts stay texts until somebody asks. That they refer only to what exists is proven on the text itself.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from itertools import chain
from typing import Any, ClassVar, Final

import msgspec

from ckptfmt.errors import FormatError
from ckptfmt.format.tree_nodes import REFERENCE_TAGS
from ckptfmt.format.tree_scalars import Node
from ckptfmt.format.tree_walk import first_tag, mark_name, parse_node
from ckptfmt.format.tree_walk import marks as find_marks
from ckptfmt.format.tree_walk import references as references_below


class Trees(msgspec.Struct, kw_only=True):
    """The state: one tree for all ranks, and by rank (decimal text) the nodes of its ``per_rank`` slots."""

    common: Any = None
    per_rank: dict[str, dict[str, Any]] = {}

    def slots_of(self, rank: int) -> dict[str, Node]:
        """Return what ``rank`` kept for itself, by slot."""
        return self.per_rank.get(str(rank), {})

    def nodes(self) -> Iterator[Node]:
        """Yield the common tree, then every rank's nodes."""
        yield self.common
        yield from chain.from_iterable(slots.values() for slots in self.per_rank.values())

    def references(self) -> Iterator[tuple[str, str]]:
        """Yield (tag, name) of every reference to a tensor, in the order of ``nodes``."""
        for node in self.nodes():
            yield from ((tag, name) for tag, name in references_below(node) if tag in REFERENCE_TAGS)

    def first_tag(self, names: Collection[str], tags: Collection[str]) -> str | None:
        """Return which of ``tags`` the first reference to a tensor of one of ``names`` has; None if there is none."""
        return next((tag for tag, name in self.references() if tag in tags and name in names), None)


class TreeTexts(Trees, frozen=True, dict=True, eq=False):  # type: ignore[misc]
    """Trees that were stored as these texts (``msgspec.Raw``), each read strictly, once, when somebody asks for it.

    Asking raises ``FormatError`` for what is no tree. Its references are known without: those of a text that
    ``refer_only_to`` has proven stand in it as they are, and all others are values already.
    """

    _is_proven: ClassVar[bool] = False

    @cached_property  # type: ignore[misc]
    def common(self) -> Node:
        return _node(self._common_text(), "the state")

    @cached_property  # type: ignore[misc]
    def per_rank(self) -> dict[str, dict[str, Node]]:  # type: ignore[override]
        return {rank: self.slots_of(int(rank)) for rank in self.slot_texts()}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Trees):
            return NotImplemented
        return bool(self.common == other.common and self.per_rank == other.per_rank)

    __hash__ = None  # type: ignore[assignment]

    def slots_of(self, rank: int) -> dict[str, Node]:
        # One rank's alone: of a thousand ranks a reader is one.
        read: dict[int, dict[str, Node]] = vars(self).setdefault("_slots_of", {})
        if rank not in read:
            texts = self.slot_texts().get(str(rank), {})
            read[rank] = {slot: _node(bytes(text), f"the tree of rank {rank}") for slot, text in texts.items()}
        return read[rank]

    def _common_text(self) -> bytes:
        return bytes(Trees.common.__get__(self))

    def slot_texts(self) -> Mapping[str, Mapping[str, msgspec.Raw]]:
        """The texts by rank and slot."""
        found: Mapping[str, Mapping[str, msgspec.Raw]] = Trees.per_rank.__get__(self)  # type: ignore[attr-defined]
        return found

    def references(self) -> Iterator[tuple[str, str]]:
        if not self._is_proven:
            yield from super().references()
            return
        for window in chain.from_iterable(map(_windows, self._texts())):
            yield from _TAGGED_REFERENCE.findall(window)

    def first_tag(self, names: Collection[str], tags: Collection[str]) -> str | None:
        if not self._is_proven:
            return super().first_tag(names, tags)
        return next(filter(None, (first_tag(text, names, tags) for text in self._texts())), None)

    def _texts(self) -> Iterator[bytes]:
        """Yield the texts as they are stored, in the order of ``nodes``."""
        yield self._common_text()
        for slots in self.slot_texts().values():
            yield from map(bytes, slots.values())

    def refer_only_to(self, names: Mapping[str, object]) -> bool:
        """Whether it is certain that these are trees, all of whose references exist. False: look at every value."""
        slots = frozenset(chain.from_iterable(self.slot_texts().values()))
        texts = self._texts()
        proven = _refers_only_to(next(texts), names, slots) and all(
            _refers_only_to(text, names, frozenset()) for text in texts
        )
        vars(self)["_is_proven"] = proven
        return proven


_TAGS: Final = "|".join(sorted(REFERENCE_TAGS))
_NAME: Final = r'":\[?"([^"]*)"(?:\}|,"[^"]*"\]\})'
_REFERENCE: Final = re.compile(r'\{"(?:%s)%s' % (_TAGS, _NAME))  # noqa: UP031
"""A reference, which may have one flag: the tensor's name."""
_TAGGED_REFERENCE: Final = re.compile(r'\{"(%s)%s' % (_TAGS, _NAME))  # noqa: UP031
"""The same: its tag, and the tensor's name."""
_OTHER: Final = re.compile(r'\{"(?!(?:%s)")([a-z_]+)":' % _TAGS)  # noqa: UP031
"""The tag of any other object."""
_SLOT: Final = re.compile(r'\{"per_rank":"([^"]*)"\}')
_WINDOW_BYTES: Final = 64 << 10


def _refers_only_to(text: bytes, names: Mapping[str, object], slots: frozenset[str]) -> bool:
    """Whether every object in a JSON text has one member, and every reference and slot names what exists.

    Without escapes a quote begins or ends a string. ``{"`` before a letter is then no end of a string, as none is
    followed by a letter: each match is an object with its first member. If there are no other braces and colons, no
    string holds any, and no object has a second member. False also where that can't be told.
    """
    if b"\\" in text:
        return False
    try:
        return all(_is_sound(window, names, slots) for window in _windows(text))
    except UnicodeDecodeError:
        return False


def _windows(text: bytes) -> Iterator[str]:
    """Yield ``text`` piece by piece: what is found in one is forgotten before more memory is needed."""
    begin = 0
    while begin < len(text):
        end = text.find(b'{"', begin + _WINDOW_BYTES)
        end = len(text) if end < 0 else end
        yield text[begin:end].decode("utf-8")
        begin = end


def _is_sound(window: str, names: Mapping[str, object], slots: frozenset[str]) -> bool:
    found, others = _REFERENCE.findall(window), _OTHER.findall(window)
    if not len(found) + len(others) == window.count("{") == window.count(":"):
        return False
    if "per_rank" in others:
        filled = _SLOT.findall(window)
        if len(filled) != others.count("per_rank") or not slots.issuperset(filled):
            return False
    return all(map(names.__contains__, found))


def _node(text: bytes, what: str) -> Node:
    try:
        node = msgspec.json.decode(text)
        if msgspec.json.encode(node) == text:
            return node
    except (msgspec.MsgspecError, UnicodeError, RecursionError, OverflowError):
        pass
    return parse_node(text, what)


def check_references(trees: Trees, names: Mapping[str, object], what: str) -> None:
    """Check that every reference is to one of ``names`` (tensors and aliases), and that some rank fills every slot."""
    if isinstance(trees, TreeTexts) and trees.refer_only_to(names):
        return
    slots = {slot for nodes in trees.per_rank.values() for slot in nodes}
    for mark in find_marks(trees.common, names):
        name = mark_name(mark)
        if name not in (slots if mark[0] == "per_rank" else names):
            raise FormatError(f"{what}: the state refers to the {mark[0]} {name!r}, which does not exist")
    for rank, nodes in trees.per_rank.items():
        for mark in chain.from_iterable(find_marks(node, names) for node in nodes.values()):
            name = mark_name(mark)
            if mark[0] == "per_rank" or name not in names:
                raise FormatError(
                    f"{what}: the tree of rank {rank} refers to the {mark[0]} {name!r}, which is not there"
                )
