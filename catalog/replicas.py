"""Which packs a tier holds, and which generations it holds whole: under the lock of their run."""

from __future__ import annotations

from collections.abc import Sequence

from ckptfmt.catalog import tiers
from ckptfmt.catalog.free_text import as_kept
from ckptfmt.catalog.transaction import NOW, Transaction, lock_generation, record
from ckptfmt.errors import Conflict, InvalidInput, NotFound
from ckptfmt.format.states import State
from ckptfmt.ports.records import ReplicaPack

_REFERRED = """
SELECT k.generation_key, k.name, k.id FROM packs AS k JOIN generation_packs AS u ON u.pack_id = k.id
WHERE u.generation_id = :generation
"""
_MISSING = """
SELECT k.name FROM packs AS k JOIN generation_packs AS u ON u.pack_id = k.id
WHERE u.generation_id = :generation
  AND NOT EXISTS (SELECT 1 FROM replicas AS x WHERE x.pack_id = k.id AND x.tier_id = :tier)
ORDER BY k.name LIMIT 3
"""
_IN_FOLDER = "SELECT k.id FROM packs AS k WHERE k.repository_id = :repository AND k.generation_key = :key"
_NAMED = " AND k.name = :name"
_NO_LONGER_WHOLE = """
DELETE FROM replicated_generations WHERE tier_id = :tier AND (generation_id = :generation
  OR generation_id IN (SELECT u.generation_id FROM generation_packs AS u WHERE u.pack_id IN ({packs})))
"""
_DROP = "DELETE FROM replicas WHERE tier_id = :tier AND pack_id IN ({packs})"
_KEPT = (State.DURABLE, State.COMMITTED)


def note(tx: Transaction, generation_id: int, tier: str, packs: Sequence[ReplicaPack]) -> None:
    """The tier holds these packs; names and times of those that it held before move."""
    _, row = lock_generation(tx, generation_id)
    if row.state not in _KEPT:
        raise Conflict(
            f"generation {generation_id} is {row.state}: only of durable and committed ones is it noted which tiers "
            "hold their packs",
            kind="not_kept",
        )
    tier_id = tiers.id_of(tx, tier)
    packs = list(map(as_kept, packs))
    if len({(pack.generation_key, pack.pack) for pack in packs}) != len(packs):
        raise InvalidInput(f"a pack of generation {generation_id} is noted twice for the tier {tier}")
    ids = {(key, name): id for key, name, id in tx.session.rows(_REFERRED, generation=generation_id)}
    unknown = [pack for pack in packs if (pack.generation_key, pack.pack) not in ids]
    if unknown:
        raise NotFound(
            f"generation {generation_id} does not refer to pack {unknown[0].pack} of generation "
            f"{unknown[0].generation_key}: note what its manifest names"
        )
    now = tx.now()
    rows = [
        {
            "pack_id": ids[pack.generation_key, pack.pack],
            "tier_id": tier_id,
            "name": pack.name,
            "verified_at": now,
        }
        for pack in packs
    ]
    tx.session.insert_rows("replicas", rows, if_absent=True)
    tx.session.update_rows("replicas", ("pack_id", "tier_id"), rows)


def mark_whole(tx: Transaction, generation_id: int, tier: str) -> None:
    """The tier holds all of the committed generation."""
    run, row = lock_generation(tx, generation_id)
    if row.state != State.COMMITTED:
        raise Conflict(f"generation {generation_id} is {row.state}: a tier holds committed ones only", kind="not_kept")
    tier_id = tiers.id_of(tx, tier)
    missing = [name for (name,) in tx.session.rows(_MISSING, generation=generation_id, tier=tier_id)]
    if missing:
        raise Conflict(
            f"generation {generation_id} is not whole on the tier {tier}: pack {missing[0]} was not noted; copy it "
            "with `ckptfmt replicate`",
            kind="replica_incomplete",
        )
    values = {"generation_id": generation_id, "tier_id": tier_id, "replicated_at": NOW}
    if tx.insert_if_absent("replicated_generations", **values):
        record(tx, run.id, "replicate", generation_id=row.id, detail={"tier": tier})


def drop(tx: Transaction, generation_id: int, tier: str, *, names: Sequence[str] | None) -> None:
    """The tier holds these packs of the generation's folder no longer, nor whole what refers to them."""
    run, row = lock_generation(tx, generation_id)
    folder = {"tier": tiers.id_of(tx, tier), "repository": tx.repository_id, "key": row.key}
    packs = _IN_FOLDER if names is None else _IN_FOLDER + _NAMED
    whole = dropped = 0
    for name in [None] if names is None else names:
        given = folder if name is None else {**folder, "name": name}
        whole += tx.session.execute(_NO_LONGER_WHOLE.format(packs=packs), **given, generation=row.id)
        dropped += tx.session.execute(_DROP.format(packs=packs), **given)
    if dropped or whole:
        record(tx, run.id, "drop", generation_id=row.id, detail={"tier": tier, "packs": dropped})
