"""What a server does with conditions and checksums, found out by asking it: some take both and heed neither."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, TypeVar

from ckptfmt.backends.fork_locks import ForkLock
from ckptfmt.backends.keys import temporary_name
from ckptfmt.backends.object_errors import Cause, Failure
from ckptfmt.backends.object_retry import Patience
from ckptfmt.backends.object_store import MultipartStore, ObjectStore

_BYTES: Final = memoryview(b"ckptfmt asks what this server does")
_OTHERS: Final = memoryview(b"ckptfmt was told that it is done")
_REFUSED: Final = frozenset({Cause.DAMAGED, Cause.INVALID})
_IGNORANT: Final = frozenset({Cause.UNSUPPORTED, Cause.INVALID})


@dataclass(frozen=True)
class Manners:
    """Of whole objects."""

    conditional: bool
    """A PUT with ``If-None-Match: *`` never overwrites."""
    checked: bool
    """Bytes that differ from the CRC-32 that came with them are refused."""


T = TypeVar("T")

_found: Final[dict[tuple[str, str], Manners | bool]] = {}
_lock: Final = ForkLock()


def _once(url: str, what: str, ask: Callable[[], T]) -> T:
    """Ask once per root and process; a child of a fork knows what its parent found."""
    with _lock:
        known = _found.get((url, what))
        if known is None:
            known = _found[url, what] = ask()  # type: ignore[assignment]
        return known  # type: ignore[return-value]


def forget(url: str) -> None:
    """Ask again, where the server may have become another one."""
    with _lock:
        for known in [known for known in _found if known[0] == url]:
            del _found[known]


def manners(store: ObjectStore, url: str, root: str, patience: Patience) -> Manners:
    """Find out with an object of a name of its own right under ``root``, which is removed again."""
    return _once(url, "put", lambda: _ask_put(store, root + temporary_name(), patience))


def _ask_put(store: ObjectStore, key: str, patience: Patience) -> Manners:
    try:
        patience.insist(lambda: store.put(key, _BYTES, absent=True))
    except Failure as failure:
        if failure.cause is not Cause.TAKEN:  # by an earlier try, whose answer was lost
            raise
    try:
        return Manners(conditional=_heeds_condition(store, key, patience), checked=_compares(store, key, patience))
    finally:
        _remove(store, key, patience)


def _heeds_condition(store: ObjectStore, key: str, patience: Patience) -> bool:
    try:
        patience.insist(lambda: store.put(key, _OTHERS, absent=True))
    except Failure as failure:
        if failure.cause in _IGNORANT:
            return False
        if failure.cause is not Cause.TAKEN:
            raise
    return patience.insist(lambda: store.get(key, len(_BYTES)))[0] == _BYTES


def _compares(store: ObjectStore, key: str, patience: Patience) -> bool:
    once = Patience(1, patience.seconds)  # a refusal of damaged bytes is what is wanted here
    try:
        once.insist(lambda: store.put(key, _BYTES, absent=False, crc=0))
    except Failure as failure:
        return failure.cause in _REFUSED
    return False


def completes_conditionally(store: MultipartStore, url: str, root: str, patience: Patience) -> bool:
    """Whether the completion of a multipart upload with ``If-None-Match: *`` never overwrites."""
    return _once(url, "complete", lambda: _ask_complete(store, root + temporary_name(), patience))


def _ask_complete(store: MultipartStore, key: str, patience: Patience) -> bool:
    from zlib import crc32

    patience.insist(lambda: store.put(key, _BYTES, absent=False))
    upload = patience.insist(lambda: store.begin(key))
    try:
        part = patience.insist(lambda: store.put_part(key, upload, 1, (_OTHERS,), crc32(_OTHERS)))
        try:
            patience.insist(lambda: store.complete(key, upload, [part], absent=True))
        except Failure as failure:
            if failure.cause is not Cause.TAKEN and failure.cause not in _IGNORANT | {Cause.NO_UPLOAD}:
                raise
            return failure.cause is Cause.TAKEN
        return False
    finally:
        with suppress(Failure):
            patience.insist(lambda: store.abort(key, upload))
        _remove(store, key, patience)


def _remove(store: ObjectStore, key: str, patience: Patience) -> None:
    with suppress(Failure):  # without the right to delete it stays, as gc says
        patience.insist(lambda: store.delete(key))
