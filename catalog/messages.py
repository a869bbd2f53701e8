"""The message board of a launch: what its ranks tell each other when they have nothing but the catalog to meet in.

A message is made once and never changed: whoever repeats a call, or comes second, is told what stands there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptfmt.catalog.free_text import document
from ckptfmt.catalog.ownership import require_owner
from ckptfmt.catalog.queries import launches, messages, runs
from ckptfmt.catalog.transaction import NOW, Transaction
from ckptfmt.errors import CatalogError, InvalidInput, NotFound

_FORGET = "DELETE FROM messages WHERE launch_id = :launch AND topic = :topic"
# Of launches that may say nothing any more: their ranks have read what they needed, or are gone.
_FORGET_OLDER = """
DELETE FROM messages
WHERE launch_id IN (SELECT id FROM launches WHERE run_id = :run AND fence < :fence)
"""


def post(tx: Transaction, launch_id: int, topic: str, rank: int, body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Leave the message, unless there is one; return what stands there."""
    if not topic or rank < 0:
        raise InvalidInput(f"a message of rank {rank} of launch {launch_id} needs a topic and a rank that is one")
    _require_of_run(tx, launch_id)
    try:
        text = document(body)
    except (TypeError, ValueError) as error:
        raise InvalidInput(
            f"the message {topic!r} of rank {rank} of launch {launch_id} is no JSON ({error}): send plain values"
        ) from error
    tx.insert_if_absent("messages", launch_id=launch_id, topic=topic, rank=rank, body=text, at=NOW)
    standing = messages.one(tx.session, launch_id, topic, rank)
    if standing is None:
        raise CatalogError(
            f"the message {topic!r} of rank {rank} of launch {launch_id} was removed as it was written: repeat it",
            transient=True,
        )
    return standing


def forget(tx: Transaction, launch_id: int, topic: str) -> None:
    """Remove the messages of one topic. Idempotent."""
    _require_of_run(tx, launch_id)
    tx.session.execute(_FORGET, launch=launch_id, topic=topic)


def forget_older(tx: Transaction, run_id: int, fence: int) -> None:
    """Remove what the launches before the one with this fence have left."""
    tx.session.execute(_FORGET_OLDER, run=run_id, fence=fence)


def _require_of_run(tx: Transaction, launch_id: int) -> None:
    """The launch must be the run's newest. No lock: a message that comes too late is read by nobody."""
    run_id = launches.run_id_of(tx.session, tx.repository_id, launch_id)
    run = None if run_id is None else runs.by_id(tx.session, tx.repository_id, run_id)
    if run is None:
        raise NotFound(f"the catalog {tx.url} has no launch {launch_id} in this repository")
    require_owner(run, launches.by_id(tx.session, tx.repository_id, launch_id))
