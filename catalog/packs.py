"""Which generation refers to which packs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Row, insert, select

from ckptfmt.catalog.schema import generation_packs, generations, packs
from ckptfmt.catalog.transaction import Transaction
from ckptfmt.errors import Conflict, InvalidInput
from ckptfmt.format.states import State
from ckptfmt.ports.catalog import PackRecord


def refer(tx: Transaction, generation: Row[Any], records: Sequence[PackRecord]) -> None:
    """Record the packs of a generation, under the lock of its run.

    A pack of another generation must be in use by a committed one of the same run: its lock then proves that
    gc cannot be deleting the pack now.
    """
    if len({(pack.generation_key, pack.name) for pack in records}) != len(records):
        raise InvalidInput(f"generation {generation.id} names a pack twice")
    for pack in records:
        known = tx.connection.execute(
            select(packs).where(
                packs.c.repository_id == tx.repository_id,
                packs.c.generation_key == pack.generation_key,
                packs.c.name == pack.name,
            )
        ).one_or_none()
        if known is not None and (known.nbytes, known.header_digest) != (pack.nbytes, pack.header_digest):
            raise Conflict(
                f"pack {pack.name} of generation {pack.generation_key} is recorded with {known.nbytes} bytes and "
                f"header digest {known.header_digest}, not {pack.nbytes} and {pack.header_digest}: packs never change"
            )
        if pack.generation_key != generation.key:
            _require_committed_user(tx, generation, pack, known)
        pack_id = known.id if known is not None else _insert(tx, pack)
        tx.connection.execute(
            tx.insert_if_absent(generation_packs).values(generation_id=generation.id, pack_id=pack_id)
        )


def _require_committed_user(tx: Transaction, generation: Row[Any], pack: PackRecord, known: Row[Any] | None) -> None:
    if known is not None:
        user = tx.connection.execute(
            select(generations.c.id)
            .join(generation_packs, generation_packs.c.generation_id == generations.c.id)
            .where(
                generation_packs.c.pack_id == known.id,
                generations.c.run_id == generation.run_id,
                generations.c.state == State.COMMITTED,
            )
            .limit(1)
        ).scalar_one_or_none()
        if user is not None:
            return
    raise Conflict(
        f"generation {generation.id} refers to pack {pack.name} of generation {pack.generation_key}, which no "
        "committed generation of its run holds any more: write the bytes again"
    )


def _insert(tx: Transaction, pack: PackRecord) -> int:
    pack_id: int = tx.connection.execute(
        insert(packs)
        .values(
            repository_id=tx.repository_id,
            generation_key=pack.generation_key,
            name=pack.name,
            rank=pack.rank,
            nbytes=pack.nbytes,
            header_digest=pack.header_digest,
        )
        .returning(packs.c.id)
    ).scalar_one()
    return pack_id
