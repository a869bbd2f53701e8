"""The three verdicts of a save that failed or hangs."""

from __future__ import annotations

from protocol_model import transactions
from protocol_model import vector as v
from protocol_model.machine import IDLE, STEPS, Actor, Out, World, attempt, emit, goto, step
from protocol_model.save_steps import prove_row
from protocol_model.transactions import ALREADY_COMMITTED, OK
from protocol_model.variant import Mutant

_SESSION = "ckptfmt.engine.save.session:SaveSession"


def find_verdict(world: World, s: bytes, a: Actor, out: Out, g: int, aborted: str) -> None:
    """Read the row; if it is still open, abort it, and go on with the step ``aborted``."""
    row = v.ROWS[g]
    fence = s[a.at + v.HELD]
    seeking = STEPS[s[a.at + v.PC]].name

    def conclude(t: bytearray) -> str:
        if t[row + v.SEQ]:
            if t[row + v.PROVEN] or t[row + v.STATE] != v.COMMITTED:
                report = v.PROVEN_REPORT if t[row + v.PROVEN] else v.PENDING_REPORT
                t[v.GHOSTS[g] + v.REPORTED] = max(t[v.GHOSTS[g] + v.REPORTED], report)
                return IDLE
            return "watch_committed" if a.kind == "watchdog" else prove_row(t, a, g)
        t[v.GHOSTS[g] + v.FAILED] = 1
        return aborted

    if s[row + v.STATE] not in v.OPEN and s[row + v.STATE] != v.NO_ROW:
        t = bytearray(s)
        goto(t, a, conclude(t))
        emit(out, s, t, a, "the row has it", g=g, effect=False)
        return
    if world.variant.mutant is Mutant.FAILED_WITHOUT_SWAP:
        t = bytearray(s)
        t[v.GHOSTS[g] + v.FAILED] = 1
        goto(t, a, IDLE)
        emit(out, s, t, a, "says failed", g=g, effect=False)

    def then(t: bytearray, answer: str) -> str:
        if answer == OK:
            return conclude(t)
        return seeking if answer == ALREADY_COMMITTED else IDLE  # fenced: unknown

    attempt(world, s, a, out, lambda t: transactions.abort(world.variant, t, g, fence), then, g=g)


@step(
    "verdict",
    "seeks the verdict on {g}: reads the row, or aborts it",
    "ckptfmt.engine.save.outcome:find_verdict",
    transactions.LINKS["abort"],
    op="abort",
)
def _verdict(world: World, s: bytes, a: Actor, out: Out) -> None:
    find_verdict(world, s, a, out, a.generation, "close_slot")


@step(
    "watch",
    "past the deadline, on behalf of a writer that hangs, seeks the verdict on {g}",
    f"{_SESSION}.expire",
    "ckptfmt.engine.save.outcome:find_verdict",
    op="abort",
)
def _watch(world: World, s: bytes, a: Actor, out: Out) -> None:
    find_verdict(world, s, a, out, a.generation, IDLE)


@step("watch_committed", "reports {g} as committed, its proof pending", f"{_SESSION}._settle")
def _watch_committed(world: World, s: bytes, a: Actor, out: Out) -> None:
    t = bytearray(s)
    ghost = v.GHOSTS[a.generation] + v.REPORTED
    t[ghost] = max(t[ghost], v.PENDING_REPORT)
    goto(t, a, IDLE)
    emit(out, s, t, a, "done", g=a.generation, effect=False)
