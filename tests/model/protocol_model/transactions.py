"""What the catalog does in one transaction: the run's lock, the fence, and a step of the real transition table.

Each function changes ``s`` and returns how it was answered. They stand for ``ckptfmt.catalog`` (see ``LINKS``).
"""

from __future__ import annotations

from typing import Final

from protocol_model import vector as v
from protocol_model.variant import Mutant, Variant

OK, FENCED, REFUSED, ALREADY_COMMITTED = "ok", "fenced", "refused", "already committed"

LINKS: Final = {
    "begin": "ckptfmt.catalog.saves:begin",
    "report_rank": "ckptfmt.catalog.rank_reports:report",
    "mark_durable": "ckptfmt.catalog.generations:mark_durable",
    "commit": "ckptfmt.catalog.generations:commit",
    "set_proven": "ckptfmt.catalog.generations:set_proven",
    "abort": "ckptfmt.catalog.generations:abort",
    "adopt": "ckptfmt.catalog.generations:adopt",
    "retire": "ckptfmt.catalog.retention:retire",
    "mark_swept": "ckptfmt.catalog.retention:mark_swept",
    "acquire": "ckptfmt.catalog.launches:acquire",
    "note": "ckptfmt.catalog.runs:note",
    "open_reader": "ckptfmt.catalog.readers:open_reader",
}


def _fence_holds(variant: Variant, s: bytearray, g: int, fence: int) -> bool:
    if variant.mutant is Mutant.FENCE_ON_ROW:
        return fence >= s[v.ROWS[g] + v.ROW_FENCE]
    return s[v.FENCE] == fence


def _move(s: bytearray, g: int, name: str) -> bool:
    at = v.ROWS[g] + v.STATE
    target = v.MOVES.get((name, s[at]))
    if target is None:
        return False
    s[at] = target
    return True


def acquire(s: bytearray) -> int:
    """A new launch of the run; the older one's lease ends with it. Returns its fence."""
    s[v.FENCE] += 1
    s[v.FENCE_MAX] = max(s[v.FENCE_MAX], s[v.FENCE])
    return s[v.FENCE]


def begin(variant: Variant, s: bytearray, g: int, fence: int) -> str:
    if not _fence_holds(variant, s, g, fence):
        return FENCED
    row = v.ROWS[g]
    if s[row + v.STATE] == v.NO_ROW:
        s[row + v.STATE] = v.INITIAL
        s[row + v.ROW_FENCE] = fence
    return OK


def report_rank(s: bytearray, g: int, rank: int) -> str:
    row = v.ROWS[g]
    if s[row + v.ACKS] >> rank & 1:
        return OK
    if s[row + v.STATE] != v.WRITING:
        return REFUSED
    s[row + v.ACKS] |= 1 << rank
    return OK


def mark_durable(variant: Variant, s: bytearray, g: int, fence: int, manifest: int) -> str:
    if not _fence_holds(variant, s, g, fence):
        return FENCED
    row = v.ROWS[g]
    if s[row + v.STATE] != v.WRITING:
        gone = s[row + v.STATE] in (v.NO_ROW, v.ABORTED) or (s[row + v.SEQ] == 0 and s[row + v.STATE] == v.DELETED)
        return REFUSED if gone or s[row + v.MANIFEST] != manifest else OK
    if variant.mutant is not Mutant.NO_GATHER and s[row + v.ACKS] != variant.every_rank:
        return REFUSED
    if not _move(s, g, "durable"):
        return REFUSED
    s[row + v.MANIFEST] = manifest
    return OK


def commit(variant: Variant, s: bytearray, g: int, fence: int) -> str:
    """C4. ``commit_seq`` comes from the run's row."""
    if not _fence_holds(variant, s, g, fence):
        return FENCED
    row = v.ROWS[g]
    if s[row + v.SEQ]:
        return OK
    if not _move(s, g, "commit"):
        return REFUSED
    s[row + v.SEQ], s[row + v.ROW_EPOCH] = s[v.NEXT_SEQ], s[v.EPOCH]
    s[v.NEXT_SEQ] += 1
    ghost = v.GHOSTS[g] + v.C4_COUNT
    s[ghost] = min(s[ghost] + 1, 2)
    s[row + v.C4_NUMBER] = s[ghost]
    return OK


def set_proven(s: bytearray, g: int) -> str:
    row = v.ROWS[g]
    if s[row + v.SEQ] == 0:
        return REFUSED
    s[row + v.PROVEN] = 1
    return OK


def abort(variant: Variant, s: bytearray, g: int, fence: int | None) -> str:
    """``fence`` None: past its deadline anybody may."""
    row = v.ROWS[g]
    if s[row + v.STATE] == v.NO_ROW:
        return REFUSED
    if fence is not None and not _fence_holds(variant, s, g, fence):
        return FENCED
    if s[row + v.SEQ]:
        return ALREADY_COMMITTED
    if s[row + v.STATE] in v.OPEN:
        _move(s, g, "abort")
    return OK


def adopt(s: bytearray, g: int, fence: int, verdict: int) -> str:
    """Commit on the evidence of a verdict that was found, exactly as it says."""
    if s[v.FENCE] != fence:
        return FENCED
    row = v.ROWS[g]
    seq, epoch, manifest, c4 = v.verdict_facts(verdict)
    if s[row + v.SEQ]:
        same = (s[row + v.SEQ], s[row + v.ROW_EPOCH], s[row + v.MANIFEST], s[row + v.C4_NUMBER])
        return OK if same == (seq, epoch, manifest, c4) else REFUSED
    if epoch > s[v.EPOCH]:
        return REFUSED
    others = [v.ROWS[other] for other in range(v.GENERATIONS) if other != g]
    if any((s[other + v.SEQ], s[other + v.ROW_EPOCH]) == (seq, epoch) for other in others):
        return REFUSED
    if not _move(s, g, "adopt"):
        return REFUSED
    s[row + v.SEQ], s[row + v.ROW_EPOCH], s[row + v.MANIFEST], s[row + v.C4_NUMBER] = seq, epoch, manifest, c4
    s[row + v.PROVEN] = 1
    s[v.NEXT_SEQ] = max(s[v.NEXT_SEQ], seq + 1)
    return OK


def newest_proven(s: bytes | bytearray) -> int | None:
    """The run's restore point."""
    found = [
        (s[row + v.ROW_EPOCH], s[row + v.SEQ], g)
        for g, row in enumerate(v.ROWS)
        if s[row + v.STATE] == v.COMMITTED and s[row + v.PROVEN]
    ]
    return max(found)[2] if found else None


def retire(s: bytearray, g: int) -> str:
    row = v.ROWS[g]
    if s[row + v.STATE] == v.RETIRED:
        return OK
    if s[v.HOLD] or not s[row + v.PROVEN] or newest_proven(s) == g or s[v.READERS] >> g & 1:
        return REFUSED
    if not _move(s, g, "retire"):
        return REFUSED
    s[v.GHOSTS[g] + v.GIVEN_UP] = 1
    return OK


def note(s: bytearray, g: int) -> str:
    """The tombstone is durable."""
    s[v.ROWS[g] + v.CLOSED] = 1
    return OK


def mark_swept(s: bytearray, g: int) -> str:
    at = v.ROWS[g] + v.STATE
    if s[at] == v.DELETED or (s[at] in (v.RETIRED, v.ABORTED) and _move(s, g, "delete")):
        return OK
    return REFUSED


def open_reader(s: bytearray, g: int) -> str:
    if s[v.ROWS[g] + v.STATE] != v.COMMITTED:
        return REFUSED
    s[v.READERS] |= 1 << g
    return OK


def close_reader(s: bytearray, g: int) -> None:
    s[v.READERS] &= ~(1 << g) & 0xFF
