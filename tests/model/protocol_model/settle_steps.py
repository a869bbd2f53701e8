"""A launch takes the run, and what an older one left is settled: by a takeover, or by recover."""

from __future__ import annotations

from protocol_model import transactions
from protocol_model import vector as v
from protocol_model.loss import behind, numbered_twice
from protocol_model.machine import IDLE, Actor, Out, World, attempt, emit, goto, step
from protocol_model.save_steps import after_proof, at_hand, prove_row
from protocol_model.transactions import FENCED, OK
from protocol_model.variant import Mutant

_RECOVER = "ckptfmt.engine.keep.recover"


@step(
    "acquire",
    "takes the run's lease and raises the fence",
    "ckptfmt.engine.save.launch:acquire",
    transactions.LINKS["acquire"],
    op="acquire_launch",
)
def _acquire(world: World, s: bytes, a: Actor, out: Out) -> None:
    if behind(s):
        return  # opening for write refuses
    t = bytearray(s)
    t[a.at + v.HELD] = transactions.acquire(t)
    late_settling = world.variant.mutant is Mutant.SETTLE_AFTER_RESTORE and a.kind == "launcher"
    goto(t, a, "restore" if late_settling else "settle_next")
    emit(out, s, t, a, f"fence {t[a.at + v.HELD]}", g=-1)


@step(
    "settle_next",
    "looks for the next unfinished generation of an older launch",
    f"{_RECOVER}:settle_older",
    f"{_RECOVER}:_in_order",
)
def _settle_next(world: World, s: bytes, a: Actor, out: Out) -> None:
    """One whose number was given twice is passed over: its adoption would be refused."""
    held = s[a.at + v.HELD]
    rows = sorted(
        (s[row + v.ROW_FENCE], g)
        for g, row in enumerate(v.ROWS)
        if s[row + v.STATE] in v.OPEN and s[row + v.ROW_FENCE] < held and not numbered_twice(s, g)
    )
    t = bytearray(s)
    if rows:
        g = rows[0][1]
        t[a.at + v.GEN], t[a.at + v.NOTE] = g, s[v.ROWS[g] + v.STATE]
        goto(t, a, "slot")
        emit(out, s, t, a, "finds it", g=g)
        return
    following = "restore" if a.kind == "launcher" and s[v.RESTORED] < held else IDLE
    goto(t, a, following)
    emit(out, s, t, a, "there is none", g=-1)


@step("slot", "reads the verdict slot of {g}", f"{_RECOVER}:_adopt_if_proven", "ckptfmt.engine.verdicts:read_commit")
def _slot(world: World, s: bytes, a: Actor, out: Out) -> None:
    g = at_hand(s, a)
    found = s[v.FOLDERS[g] + v.COMMIT]
    retired = v.proves(found) and s[v.FOLDERS[g] + v.STONE]
    following = "check" if found == 0 else "adopt" if v.proves(found) and not retired else "settle_abort"
    t = bytearray(s)
    goto(t, a, following)
    told = "committed, and retired since" if retired else "committed" if v.proves(found) else "aborted or damaged"
    emit(out, s, t, a, "empty" if found == 0 else told, g=g)


@step("check", "checks whether {g} can be finished", f"{_RECOVER}:_check_complete")
def _check(world: World, s: bytes, a: Actor, out: Out) -> None:
    g = at_hand(s, a)
    row, folder = v.ROWS[g], v.FOLDERS[g]
    every = world.variant.every_rank
    if s[a.at + v.NOTE] == v.DURABLE:
        whole, following = v.complete(s, g, s[row + v.MANIFEST], world.variant.ranks), "commit"
    else:
        whole = s[row + v.ACKS] & s[folder + v.PARTS] & s[folder + v.PACKS] == every
        following = "merge"
    t = bytearray(s)
    goto(t, a, following if whole else "settle_abort")
    emit(out, s, t, a, "it can" if whole else "it cannot", g=g)


@step("settle_abort", "aborts {g} as incomplete", f"{_RECOVER}:settle", transactions.LINKS["abort"], op="abort")
def _settle_abort(world: World, s: bytes, a: Actor, out: Out) -> None:
    g, fence = at_hand(s, a), s[a.at + v.HELD]

    def then(t: bytearray, answer: str) -> str:
        if answer != OK:
            return IDLE
        t[v.GHOSTS[g] + v.FAILED] = 1
        return "settle_next"

    attempt(world, s, a, out, lambda t: transactions.abort(world.variant, t, g, fence), then, g=g)


@step("adopt", "sees that {g} is what its verdict says", f"{_RECOVER}:adopt", "ckptfmt.engine.opened:open_proven")
def _adopt(world: World, s: bytes, a: Actor, out: Out) -> None:
    g = at_hand(s, a)
    folder = v.FOLDERS[g]
    found = s[folder + v.COMMIT]
    good = not s[folder + v.STONE] and v.complete(s, g, v.verdict_facts(found)[2], world.variant.ranks)
    t = bytearray(s)
    t[a.at + v.NOTE] = found
    following = "adopt_row" if world.variant.mutant is Mutant.ADOPT_BEFORE_HINT else "adopt_hint"
    goto(t, a, following if good else after_proof(a))
    emit(out, s, t, a, "it is" if good else "refuses: retired, or something is missing", g=g)


@step(
    "adopt_hint",
    "creates the commit hint of {g}",
    f"{_RECOVER}:adopt",
    "ckptfmt.engine.protocol:create_hint",
    op="create hint",
)
def _adopt_hint(world: World, s: bytes, a: Actor, out: Out) -> None:
    """Before the row: adoption calls it proven."""
    g = at_hand(s, a)

    def do(t: bytearray) -> str:
        t[v.FOLDERS[g] + v.HINT] = 1
        return OK

    attempt(world, s, a, out, do, lambda t, _: "adopt_row", g=g)


@step(
    "adopt_row",
    "adopts {g} on the evidence of its verdict",
    f"{_RECOVER}:adopt",
    transactions.LINKS["adopt"],
    op="adopt",
)
def _adopt_row(world: World, s: bytes, a: Actor, out: Out) -> None:
    g, fence, found = at_hand(s, a), s[a.at + v.HELD], s[a.at + v.NOTE]
    attempt(
        world,
        s,
        a,
        out,
        lambda t: transactions.adopt(t, g, fence, found),
        lambda t, answer: prove_row(t, a, g) if answer == OK else IDLE if answer == FENCED else after_proof(a),
        g=g,
    )


@step("restore", "restores, and its ranks go on to train", "ckptfmt.launching:begin_launch")
def _restore(world: World, s: bytes, a: Actor, out: Out) -> None:
    t = bytearray(s)
    held = s[a.at + v.HELD]
    t[v.RESTORED] = max(s[v.RESTORED], held)
    late_settling = world.variant.mutant is Mutant.SETTLE_AFTER_RESTORE
    goto(t, a, "settle_next" if late_settling else IDLE)
    for other in world.actors:
        if other.kind == "saver" and other.launch == 1:
            goto(t, other, "begin")
            t[other.at + v.HELD], t[other.at + v.GEN] = held, other.generation
    emit(out, s, t, a, "done", g=-1)


@step(
    "prove_next",
    "looks for a committed generation without proof",
    f"{_RECOVER}:prove_committed",
    f"{_RECOVER}:_check_whole",
)
def _prove_next(world: World, s: bytes, a: Actor, out: Out) -> None:
    tried = s[a.at + v.HELD]  # it holds no fence
    t = bytearray(s)
    for g, row in enumerate(v.ROWS):
        if s[row + v.STATE] == v.COMMITTED and not s[row + v.PROVEN] and not tried >> g & 1:
            t[a.at + v.HELD] |= 1 << g
            if v.complete(s, g, s[row + v.MANIFEST], world.variant.ranks):
                goto(t, a, prove_row(t, a, g))
            emit(out, s, t, a, "finds it", g=g)
            return
    t[a.at + v.HELD] = 0
    goto(t, a, IDLE)
    emit(out, s, t, a, "there is none", g=-1)
