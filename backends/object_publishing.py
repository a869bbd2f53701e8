"""Small objects at an object store: there whole or not at all, exactly once, and compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from ckptfmt.backends.object_errors import UNKNOWN, Cause, Failure
from ckptfmt.backends.object_probe import Manners, manners
from ckptfmt.backends.object_retry import Patience
from ckptfmt.backends.object_store import ObjectStore
from ckptfmt.errors import InvalidInput, Unavailable

ALWAYS: Final[Callable[[], bool]] = lambda: True  # noqa: E731


@dataclass(frozen=True)
class Place:
    """A root at an object store: the driver, where in the bucket it lies, and how it is dealt with."""

    store: ObjectStore
    url: str
    shown: str
    """The URL of keys, for messages: without a query."""
    root: str
    """Of whole keys: '' or ``prefix/``."""
    patience: Patience
    single_writer: bool
    upload_grace: float
    options: Mapping[str, Any] = field(default_factory=dict)
    """``Backend.storage_options``."""

    def whole(self, key: str) -> str:
        return self.root + key

    def where(self, key: str) -> str:
        return f"{self.shown}/{key}"

    def manners(self) -> Manners:
        return manners(self.store, self.url, self.root, self.patience)

    def require_conditions(self) -> None:
        """Raise ``InvalidInput`` where nothing can keep two launches from overwriting each other's commits."""
        if not self.single_writer and not self.manners().conditional:
            raise InvalidInput(
                f"{self.shown}: this server overwrites an object although it is told not to (If-None-Match), so two "
                "launches could undo each other's commits: reading works, writing is refused. Use a server that heeds "
                'it; or, if only one job at a time ever writes here, storage_options={"single_writer": True}',
                kind="no_conditional_create",
            )

    def is_taken(self, key: str) -> bool:
        try:
            self.patience.insist(lambda: self.store.head(self.whole(key)))
        except Failure as failure:
            if failure.cause is Cause.ABSENT:
                return False
            raise
        return True


def publish(place: Place, key: str, data: memoryview, *, wanted: Callable[[], bool] = ALWAYS) -> None:
    """Create ``key``. Raises ``Failure``: ``TAKEN`` if it holds other bytes; equal ones are success.

    Whatever became of an attempt whose answer was lost is found out by looking.
    """
    if place.manners().conditional:
        etag = _publish_conditionally(place, key, data, wanted)
    else:
        etag = _publish_unconditionally(place, key, data, wanted)
    if not place.manners().checked and not holds(place, key, data):
        remove_own(place, key, etag)
        raise damaged(place, key)


def remove_own(place: Place, key: str, etag: str | None) -> bool:
    """Remove an object that is not what was sent, if it is the one that was stored then; whether it is.

    Under a key that another writer took meanwhile stands another ETag: no byte of it is touched.
    """
    with suppress(Failure):
        whole = place.whole(key)
        if etag is not None and place.patience.insist(lambda: place.store.head(whole)).etag == etag:
            place.patience.insist(lambda: place.store.delete(whole))
            return True
    return False


def _publish_conditionally(place: Place, key: str, data: memoryview, wanted: Callable[[], bool]) -> str | None:
    def attempt() -> str | None:
        try:
            return place.store.put(place.whole(key), data, absent=True)
        except Failure as failure:
            if failure.cause is not Cause.TAKEN or not _is_equal(place, key, data):
                raise
            return None

    try:
        return place.patience.insist(attempt, wanted=wanted)
    except Failure as failure:
        if failure.cause in UNKNOWN:
            with suppress(Failure):
                if _is_equal(place, key, data):
                    return None
        raise


def _publish_unconditionally(place: Place, key: str, data: memoryview, wanted: Callable[[], bool]) -> str | None:
    if place.is_taken(key):
        if not holds(place, key, data):
            raise Failure(Cause.TAKEN, "the key is taken")
        return None
    return place.patience.insist(lambda: place.store.put(place.whole(key), data, absent=False), wanted=wanted)


def holds(place: Place, key: str, data: memoryview) -> bool:
    """Whether the key holds exactly these bytes."""
    return place.patience.insist(lambda: _is_equal(place, key, data))


def _is_equal(place: Place, key: str, data: memoryview) -> bool:
    try:
        found, size = place.store.get(place.whole(key), len(data))
    except Failure as failure:
        if failure.cause is Cause.ABSENT:
            raise Failure(Cause.CLASH, "the key was taken, and is free again") from failure
        raise
    return size == len(data) and found == data


def damaged(place: Place, key: str) -> Unavailable:
    return Unavailable(
        f"write {place.where(key)}: what the store holds differs from what was sent to it; write it again under a new "
        "name, and look into the store, which does not compare what it receives",
        kind="upload_damaged",
    )
