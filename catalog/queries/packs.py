"""Which generation refers to which packs."""

from __future__ import annotations

from ckptfmt.catalog.snapshot import Snapshot
from ckptfmt.ports.records import PackRecord

_OF_GENERATION = """
SELECT p.generation_key, p.name, p.rank, p.nbytes, p.header_digest
FROM packs AS p JOIN generation_packs AS u ON u.pack_id = p.id
WHERE p.repository_id = :repository AND u.generation_id = :generation
ORDER BY p.generation_key, p.name
"""

_USERS = """
SELECT u.generation_id
FROM generation_packs AS u JOIN packs AS p ON p.id = u.pack_id JOIN generations AS g ON g.id = u.generation_id
WHERE p.repository_id = :repository AND p.generation_key = :key AND p.name = :name AND g.state <> 'deleted'
ORDER BY u.generation_id
"""


def of_generation(snapshot: Snapshot, repository_id: int, generation_id: int) -> list[PackRecord]:
    """The packs that the generation refers to, by owner and name."""
    found = snapshot.rows(_OF_GENERATION, repository=repository_id, generation=generation_id)
    return [
        PackRecord(generation_key=key, name=name, rank=rank, nbytes=nbytes, header_digest=digest)
        for key, name, rank, nbytes, digest in found
    ]


def users(snapshot: Snapshot, repository_id: int, generation_key: str, name: str) -> list[int]:
    """Ids of the generations, not deleted, that refer to the pack."""
    return [id for (id,) in snapshot.rows(_USERS, repository=repository_id, key=generation_key, name=name)]
