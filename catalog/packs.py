"""Which generation refers to which packs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ckptfmt.catalog.free_text import as_kept
from ckptfmt.catalog.transaction import Transaction
from ckptfmt.errors import Conflict, InvalidInput
from ckptfmt.ports.records import GenerationRecord, PackRecord, RunRecord

_OWN = "SELECT name, id, nbytes, header_digest FROM packs WHERE repository_id = :repository AND generation_key = :key"
_IN_USE = """
SELECT p.id FROM packs AS p WHERE p.repository_id = :repository AND p.generation_key = :key AND EXISTS (
    SELECT 1 FROM generation_packs AS u JOIN generations AS g ON g.id = u.generation_id
    WHERE u.pack_id = p.id AND g.run_id = :run AND g.state = 'committed')
"""


class _Known(NamedTuple):
    """A pack's row."""

    id: int
    nbytes: int
    header_digest: str


def refer(tx: Transaction, run: RunRecord, generation: GenerationRecord, records: Sequence[PackRecord]) -> None:
    """Record the packs of a generation, under the lock of its run: thousands in a few statements.

    A pack of another generation must be in use by a committed one of the same run: its lock then proves that
    gc cannot be deleting the pack now.
    """
    records = list(map(as_kept, records))
    if len({(pack.generation_key, pack.name) for pack in records}) != len(records):
        raise InvalidInput(f"generation {generation.id} names a pack twice")
    known: dict[str, Mapping[str, _Known]] = {}
    in_use: set[int] = set()
    for key in sorted({pack.generation_key for pack in records} - {generation.key}):
        known[key] = _of_generation(tx, key)
        used = tx.session.rows(_IN_USE, repository=tx.repository_id, key=key, run=run.id)
        in_use.update(id for (id,) in used)
    for pack in records:
        if pack.generation_key != generation.key:
            standing = known[pack.generation_key].get(pack.name)
            _require_same(pack, standing)
            if standing is None or standing.id not in in_use:
                raise _not_in_use(generation, pack)
    known[generation.key] = _inserted(tx, generation.key, records)
    for pack in records:
        _require_same(pack, known[pack.generation_key][pack.name])
    _insert_uses(tx, generation, [known[pack.generation_key][pack.name].id for pack in records])


def restore(tx: Transaction, generation: GenerationRecord, records: Sequence[PackRecord]) -> None:
    """Record the packs of a generation that storage proves: what the manifest names is what there is."""
    records = list(map(as_kept, records))
    keys = {pack.generation_key for pack in records}
    known = {key: _inserted(tx, key, records) for key in sorted(keys)}
    _insert_uses(tx, generation, [known[pack.generation_key][pack.name].id for pack in records])


def _of_generation(tx: Transaction, key: str) -> dict[str, _Known]:
    """The packs in the folder of a generation, by name."""
    return {name: _Known(*facts) for name, *facts in tx.session.rows(_OWN, repository=tx.repository_id, key=key)}


def _inserted(tx: Transaction, key: str, records: Sequence[PackRecord]) -> dict[str, _Known]:
    """Those of the packs that lie in the folder of ``key``, inserted where there was no row."""
    rows = [
        {
            "repository_id": tx.repository_id,
            "generation_key": key,
            "name": pack.name,
            "rank": pack.rank,
            "nbytes": pack.nbytes,
            "header_digest": pack.header_digest,
        }
        for pack in records
        if pack.generation_key == key
    ]
    if not rows:
        return {}
    tx.session.insert_rows("packs", rows, if_absent=True)
    return _of_generation(tx, key)


def _insert_uses(tx: Transaction, generation: GenerationRecord, pack_ids: Sequence[int]) -> None:
    rows = [{"generation_id": generation.id, "pack_id": id} for id in pack_ids]
    tx.session.insert_rows("generation_packs", rows, if_absent=True)


def _require_same(pack: PackRecord, known: _Known | None) -> None:
    if known is not None and (known.nbytes, known.header_digest) != (pack.nbytes, pack.header_digest):
        raise Conflict(
            f"pack {pack.name} of generation {pack.generation_key} is recorded with {known.nbytes} bytes and "
            f"header digest {known.header_digest}, not {pack.nbytes} and {pack.header_digest}: packs never change"
        )


def _not_in_use(generation: GenerationRecord, pack: PackRecord) -> Conflict:
    return Conflict(
        f"generation {generation.id} refers to pack {pack.name} of generation {pack.generation_key}, which no "
        "committed generation of its run holds any more: write the bytes again"
    )
