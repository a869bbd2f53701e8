"""Which generation refers to which packs."""

from __future__ import annotations

from collections.abc import Sequence

from ckptfmt.catalog.transaction import Transaction
from ckptfmt.errors import Conflict, InvalidInput
from ckptfmt.ports.records import GenerationRecord, PackRecord, RunRecord

_KNOWN = """
SELECT id, nbytes, header_digest FROM packs
WHERE repository_id = :repository AND generation_key = :key AND name = :name
"""
_COMMITTED_USER = """
SELECT g.id FROM generations AS g JOIN generation_packs AS u ON u.generation_id = g.id
WHERE u.pack_id = :pack AND g.run_id = :run AND g.state = 'committed' LIMIT 1
"""


def refer(tx: Transaction, run: RunRecord, generation: GenerationRecord, records: Sequence[PackRecord]) -> None:
    """Record the packs of a generation, under the lock of its run.

    A pack of another generation must be in use by a committed one of the same run: its lock then proves that
    gc cannot be deleting the pack now.
    """
    if len({(pack.generation_key, pack.name) for pack in records}) != len(records):
        raise InvalidInput(f"generation {generation.id} names a pack twice")
    for pack in records:
        found = tx.session.rows(_KNOWN, repository=tx.repository_id, key=pack.generation_key, name=pack.name)
        known_id, *facts = found[0] if found else (None, pack.nbytes, pack.header_digest)
        if facts != [pack.nbytes, pack.header_digest]:
            raise Conflict(
                f"pack {pack.name} of generation {pack.generation_key} is recorded with {facts[0]} bytes and "
                f"header digest {facts[1]}, not {pack.nbytes} and {pack.header_digest}: packs never change"
            )
        if pack.generation_key != generation.key:
            _require_committed_user(tx, run, generation, pack, known_id)
        pack_id = known_id if known_id is not None else _insert(tx, pack)
        tx.insert_if_absent("generation_packs", generation_id=generation.id, pack_id=pack_id)


def restore(tx: Transaction, generation: GenerationRecord, records: Sequence[PackRecord]) -> None:
    """Record the packs of a generation that storage proves: what the manifest names is what there is."""
    for pack in records:
        found = tx.session.rows(_KNOWN, repository=tx.repository_id, key=pack.generation_key, name=pack.name)
        pack_id = found[0][0] if found else _insert(tx, pack)
        tx.insert_if_absent("generation_packs", generation_id=generation.id, pack_id=pack_id)


def _require_committed_user(
    tx: Transaction, run: RunRecord, generation: GenerationRecord, pack: PackRecord, pack_id: int | None
) -> None:
    if pack_id is not None and tx.session.rows(_COMMITTED_USER, pack=pack_id, run=run.id):
        return
    raise Conflict(
        f"generation {generation.id} refers to pack {pack.name} of generation {pack.generation_key}, which no "
        "committed generation of its run holds any more: write the bytes again"
    )


def _insert(tx: Transaction, pack: PackRecord) -> int:
    return tx.insert_new(
        "packs",
        repository_id=tx.repository_id,
        generation_key=pack.generation_key,
        name=pack.name,
        rank=pack.rank,
        nbytes=pack.nbytes,
        header_digest=pack.header_digest,
    )
