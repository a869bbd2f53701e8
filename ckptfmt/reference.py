"""References: ``<repository>#<run>[@<id>|@step:N|@tag:T]``."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ckptfmt.errors import InvalidInput

At = int | str | None
"""Which generation: an id, ``"step:900"``, ``"tag:best"``, or None for the latest committed one."""


@dataclass(frozen=True)
class Selector:
    """A parsed ``at``: exactly one of the fields is set, or none for the latest."""

    id: int | None = None
    step: int | None = None
    tag: str | None = None

    def __str__(self) -> str:
        if self.id is not None:
            return f"#{self.id}"
        if self.step is not None:
            return f"step {self.step}"
        return f"tag {self.tag!r}" if self.tag is not None else "latest"


def parse_at(at: At) -> Selector:
    """Raises ``InvalidInput`` for anything but an id, ``step:N``, ``tag:T`` or None."""
    if at is None:
        return Selector()
    if isinstance(at, int) and not isinstance(at, bool):
        return Selector(id=at)
    if isinstance(at, str):
        word, colon, rest = at.partition(":")
        if at.isascii() and at.isdigit():
            return Selector(id=int(at))
        if colon and word == "step" and rest.removeprefix("-").isdigit():
            return Selector(step=int(rest))
        if colon and word == "tag" and rest:
            return Selector(tag=rest)
    raise InvalidInput(f'at={at!r}: give a generation id, "step:900", "tag:best", or None for the latest committed')


@dataclass(frozen=True)
class Reference:
    """A URL with the run and generation that it names, if it does."""

    url: str
    run: str | None = None
    at: At = None


def parse_reference(text: str | os.PathLike[str]) -> Reference:
    """Split a reference; a plain URL or path has neither run nor generation."""
    if not isinstance(text, str):
        return Reference(os.fspath(text))
    url, mark, fragment = text.rpartition("#")
    if not mark:
        return Reference(text)
    if not url or not fragment:
        raise InvalidInput(
            f"{text!r} is no reference: write <repository>#<run>, <repository>#<run>@<id>, ...@step:N or ...@tag:T"
        )
    run, at_mark, at = fragment.partition("@")
    if not run or (at_mark and not at):
        raise InvalidInput(
            f"{text!r} is no reference: write <repository>#<run>, <repository>#<run>@<id>, ...@step:N or ...@tag:T"
        )
    if at_mark:
        parse_at(at)
    return Reference(url, run, at if at_mark else None)


def merge(reference: Reference, *, run: str | None, at: At) -> Reference:
    """Add the arguments of a call; naming two different runs or generations is ``InvalidInput``."""
    if run is not None and reference.run is not None and run != reference.run:
        raise InvalidInput(f"the reference names run {reference.run!r} but run={run!r} was passed: give one of them")
    if at is not None and reference.at is not None and parse_at(at) != parse_at(reference.at):
        raise InvalidInput(f"the reference names {reference.at!r} but at={at!r} was passed: give one of them")
    return Reference(reference.url, run if run is not None else reference.run, at if at is not None else reference.at)
