"""What the ranks of a launch told each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptfmt.catalog.snapshot import Snapshot, from_json

_ONE = "SELECT body FROM messages WHERE launch_id = :launch AND topic = :topic AND rank = :rank"
_OF_TOPIC = """
SELECT m.rank, m.body FROM messages AS m JOIN launches AS l ON l.id = m.launch_id JOIN runs AS r ON r.id = l.run_id
WHERE r.repository_id = :repository AND m.launch_id = :launch AND m.topic = :topic ORDER BY m.rank
"""


def one(snapshot: Snapshot, launch_id: int, topic: str, rank: int) -> Mapping[str, Any] | None:
    """The message of one rank, None if there is none."""
    found = snapshot.rows(_ONE, launch=launch_id, topic=topic, rank=rank)
    return from_json(found[0][0]) if found else None


def of_topic(snapshot: Snapshot, repository_id: int, launch_id: int, topic: str) -> dict[int, Mapping[str, Any]]:
    """The messages of a topic, by rank."""
    found = snapshot.rows(_OF_TOPIC, repository=repository_id, launch=launch_id, topic=topic)
    return {rank: from_json(body) for rank, body in found}
