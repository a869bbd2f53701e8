"""Which way of publishing a place can be trusted with, by what is known of it and by trying."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from ckptfmt.backends.fsspec_errors import Taken
from ckptfmt.backends.fsspec_place import Place
from ckptfmt.backends.fsspec_publish import ByCondition, ByLink, ByLock, ByLooking, InMemory, Publisher, is_equal
from ckptfmt.backends.keys import temporary_name
from ckptfmt.errors import AccessDenied, BackendError, CkptError, InvalidInput, OutOfSpace, Unavailable

log = logging.getLogger("ckptfmt.backends.fsspec")

_PUBLISHERS: Final[dict[str, Callable[[], Publisher]]] = {"mode": ByCondition, "link": ByLink, "memory": ByLock}


def choose(place: Place, *, single_writer: bool) -> Publisher:
    """Return the publisher for ``place``, tried out with an object in its root that is removed again.

    ``InvalidInput`` where a taken name cannot be refused and the user has not vouched for being alone. What the place
    lacks is told by a warning.
    """
    kind = place.kind
    if not kind.writable:
        raise InvalidInput(
            f'{place.url}: this file system is only read from; open it with mode="r", or write to another place',
            kind="read_only",
        )
    why = "its fsspec file system is not known to refuse a name that is taken"
    if kind.create is not None:
        publisher = _PUBLISHERS[kind.create]()
        failure = _try_out(publisher, place)
        if failure is None:
            if not kind.survives_power_loss and kind.sync is None:
                log.warning("%s: %s", place.url, kind.durable)
            return publisher
        why = failure
    if not single_writer:
        raise InvalidInput(
            f"{place.url} cannot be written to safely: {why}, so that two launches which write at the same time "
            "could overwrite each other's commit records. Use another place; or, if never more than one launch "
            'writes here, say so with storage_options={"single_writer": True}. Reading works as it is',
            kind="no_conditional_create",
        )
    log.warning(
        "%s: objects are created by looking whether their name is free, because %s: a second launch that writes "
        "here at the same time can overwrite commit records",
        place.url,
        why,
    )
    return ByLooking()


def _try_out(publisher: Publisher, place: Place) -> str | None:
    """What is wrong with ``publisher`` here: a taken name must be refused, and what it holds be left alone."""
    key = temporary_name()
    first, second = InMemory(b"1"), InMemory(b"2")
    try:
        publisher.publish(place, key, first, read_back=True)
        try:
            publisher.publish(place, key, second, read_back=False)
        except Taken:
            return None if is_equal(place, key, first) else "the server overwrote an object although it said not to"
        return "the server overwrote an object although it was asked to create it only if its name is free"
    except Taken:
        return "the server says of a name that nobody has ever used that it is taken"
    except (AccessDenied, OutOfSpace, Unavailable):
        raise
    except BackendError as error:
        return f"creating an object only if its name is free failed ({error})"
    finally:
        try:
            place.remove(key)
        except CkptError as error:
            log.info("%s: a probe stayed behind, which sweep_debris finds: %s", place.url, error)
