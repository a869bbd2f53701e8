"""Types that a state tree can hold beyond the built-in ones.

Two doors: ``register_type`` for users' own classes, stored under a name of their choice, and
``register_tag`` for array libraries, whose tags are part of the format (``torch.Size``).
Registration is by exact type and holds for the process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ckptfmt.errors import InvalidInput


@dataclass(frozen=True)
class Registration:
    """``tag`` is None for a user's type, which goes under the tag ``registered`` with its ``name``."""

    cls: type
    name: str
    tag: str | None
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


_by_type: dict[type, Registration] = {}
_by_name: dict[str, Registration] = {}
_by_tag: dict[str, Registration] = {}


def register_type(cls: type, *, name: str, encode: Callable[[Any], Any], decode: Callable[[Any], Any]) -> None:
    """Let states hold values of exactly the type ``cls``, e.g. a named tuple or an enum.

    ``encode(value)`` returns something that a state can hold (tensors included); ``decode`` gets an
    equal thing back and returns the value. ``name`` stands in the checkpoint: keep it for good, and
    register it before loading. ``InvalidInput`` if the name or the type is taken by another.
    """
    if not isinstance(cls, type):
        raise InvalidInput(f"register_type needs a class, not {cls!r}")
    if not isinstance(name, str) or not name or len(name) > 200:
        raise InvalidInput(f"register_type({cls.__qualname__}) needs a name of 1 to 200 characters, not {name!r}")
    if cls.__module__ == "builtins":
        raise InvalidInput(f"the built-in type {cls.__qualname__} can't be registered; wrap it in a class of your own")
    _add(Registration(cls, name, None, encode, decode), _by_name, name)


def register_tag(cls: type, tag: str, to_node: Callable[[Any], Any], from_node: Callable[[Any], Any]) -> None:
    """Give an array library's type a tag of its own, ``<library>.<type>``.

    ``to_node`` returns the tag's payload: plain JSON of strings, numbers and lists. ``from_node``
    turns it back and may raise ``ValueError`` or ``TypeError`` for a payload that is none.
    """
    if "." not in tag:
        raise InvalidInput(f"the tag {tag!r} must have the form library.type")
    _add(Registration(cls, tag, tag, to_node, from_node), _by_tag, tag)


def _add(new: Registration, table: dict[str, Registration], name: str) -> None:
    for old in (table.get(name), _by_type.get(new.cls)):
        if old is not None and (_place(old.cls) != _place(new.cls) or old.name != new.name):
            raise InvalidInput(
                f"{new.cls.__qualname__} as {name!r} clashes with {old.cls.__qualname__}, registered as {old.name!r}"
            )
    table[name] = _by_type[new.cls] = new


def _place(cls: type) -> tuple[str, str]:
    # A class that was defined again (a notebook cell run twice) takes the place of its former self.
    return cls.__module__, cls.__qualname__


def for_type(cls: type) -> Registration | None:
    return _by_type.get(cls)


def for_name(name: str) -> Registration | None:
    return _by_name.get(name)


def for_tag(tag: str) -> Registration | None:
    return _by_tag.get(tag)
