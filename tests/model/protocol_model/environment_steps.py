"""What happens to the actors: requests that land late, deadlines, and a catalog that is put back."""

from __future__ import annotations

from protocol_model import transactions
from protocol_model import vector as v
from protocol_model.loss import PUT_BACK, behind, numbered_twice
from protocol_model.machine import Actor, Out, World, emit, step
from protocol_model.variant import Mutant


@step("land", "a request about {g} that was under way lands", "ckptfmt.ports.backend:Backend.create")
def _land(world: World, s: bytes, a: Actor, out: Out) -> None:
    for g, (late, folder) in enumerate(zip(v.LATE, v.FOLDERS, strict=True)):
        if s[late + v.LATE_C4]:
            t = bytearray(s)
            t[late + v.LATE_C4] = 0
            answer = transactions.commit(world.variant, t, g, s[late + v.LATE_C4])
            emit(out, s, t, a, f"C4: {answer}", g=g)
        if s[late + v.LATE_VERDICT]:
            t = bytearray(s)
            t[late + v.LATE_VERDICT] = 0
            if s[folder + v.COMMIT] == 0:
                t[folder + v.COMMIT] = s[late + v.LATE_VERDICT]
            emit(out, s, t, a, "COMMIT.json", g=g)
        if s[late + v.LATE_MANIFESTS]:
            t = bytearray(s)
            t[late + v.LATE_MANIFESTS] = 0
            if not (world.variant.mutant is Mutant.MANIFEST_FIXED_NAME and s[folder + v.MANIFESTS]):
                t[folder + v.MANIFESTS] |= s[late + v.LATE_MANIFESTS]
            emit(out, s, t, a, "manifest", g=g)
        for kind, stored, word in ((v.LATE_PACKS, v.PACKS, "pack"), (v.LATE_PARTS, v.PARTS, "part")):
            for rank in range(world.variant.ranks):
                if s[late + kind] >> rank & 1:
                    t = bytearray(s)
                    t[late + kind] &= ~(1 << rank)
                    t[folder + stored] |= 1 << rank
                    emit(out, s, t, a, f"a rank's {word}", g=g)


@step("deadline", "{g} is aborted past its deadline", transactions.LINKS["abort"])
def _deadline(world: World, s: bytes, a: Actor, out: Out) -> None:
    for g, row in enumerate(v.ROWS):
        if s[row + v.STATE] in v.OPEN:
            t = bytearray(s)
            transactions.abort(world.variant, t, g, None)
            t[v.GHOSTS[g] + v.FAILED] = 1
            emit(out, s, t, a, "done", g=g)


@step("put_back", "the catalog goes back in time", "spec/protocol-model.md#put back")
def _put_back(world: World, s: bytes, a: Actor, out: Out) -> None:
    t = bytearray(s)
    if s[v.ROLLED] == 0:
        t[v.ROLLED] = 1
        t[v.BACKUP : v.BACKUP + v.CATALOG_BYTES] = s[: v.CATALOG_BYTES]
        emit(out, s, t, a, "a copy is taken", g=-1)
    elif s[v.ROLLED] == 1 and s[: v.CATALOG_BYTES] != s[v.BACKUP : v.BACKUP + v.CATALOG_BYTES]:
        t[v.ROLLED] = PUT_BACK
        t[: v.CATALOG_BYTES] = s[v.BACKUP : v.BACKUP + v.CATALOG_BYTES]
        t[v.BACKUP : v.BACKUP + v.CATALOG_BYTES] = bytes(v.CATALOG_BYTES)
        emit(out, s, t, a, "the copy is put back", g=-1)


@step("rebuild", "the catalog is rebuilt from what storage proves", "spec/protocol-model.md#rebuilt")
def _rebuild(world: World, s: bytes, a: Actor, out: Out) -> None:
    if not behind(s):
        return
    t = bytearray(s)
    rebuild(t)
    emit(out, s, t, a, f"epoch {t[v.EPOCH]}", g=-1)


def rebuild(t: bytearray) -> None:
    """Claim the next epoch, lift the counters, and restore what storage proves; nothing may be retired then."""
    t[v.EPOCH] += 1
    t[v.HOLD] = 1
    t[v.FENCE] += 1
    for g, (row, folder) in enumerate(zip(v.ROWS, v.FOLDERS, strict=True)):
        found = t[folder + v.COMMIT]
        if found and t[row + v.STATE] == v.NO_ROW:
            t[row + v.STATE] = v.INITIAL
        if v.proves(found) and t[row + v.SEQ] == 0:
            t[folder + v.HINT] = 1
            transactions.adopt(t, g, t[v.FENCE], found)
        if found and t[row + v.STATE] in v.OPEN and (found == v.ABORTED_VERDICT or numbered_twice(t, g)):
            t[row + v.STATE] = v.MOVES["abort", t[row + v.STATE]]
        if t[row + v.STATE] == v.COMMITTED and (found == v.ABORTED_VERDICT or t[folder + v.STONE]):
            t[row + v.STATE] = v.MOVES["retire", v.COMMITTED]
