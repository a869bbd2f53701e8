"""Retirement and gc: the verdict or the tombstone first, then the bytes, then the row."""

from __future__ import annotations

from protocol_model import store, transactions
from protocol_model import vector as v
from protocol_model.loss import behind
from protocol_model.machine import CODE, IDLE, Actor, Out, Ways, World, attempt, emit, goto, step
from protocol_model.save_steps import at_hand, tear_long
from protocol_model.transactions import OK
from protocol_model.variant import Mutant

_GC = "ckptfmt.engine.keep.gc"
_SWEEP = "ckptfmt.engine.sweep"


def _after_sweep(a: Actor) -> str:
    return "gc_next" if a.kind == "gc" else IDLE


@step("retire", "retires {g}", f"{_GC}:retire", transactions.LINKS["retire"], op="retire")
def _retire(world: World, s: bytes, a: Actor, out: Out) -> None:
    if behind(s):
        return
    for g, row in enumerate(v.ROWS):
        if s[row + v.STATE] != v.COMMITTED:
            continue
        t = bytearray(s)
        if world.variant.mutant is Mutant.NO_READER_RULE:
            t[v.READERS] = 0
        if transactions.retire(t, g) == OK:
            t[v.READERS] = s[v.READERS]
            t[a.at + v.GEN] = g
            goto(t, a, _to_close(world))
            emit(out, s, t, a, "done", g=g)


def _to_close(world: World) -> str:
    return "closed" if world.variant.mutant is Mutant.CLOSED_BEFORE_TOMBSTONE else "stone"


def _closed(a: Actor) -> str:
    return "grace" if a.kind == "gc" else "retire"


@step("stone", "creates RETIRED.json of {g}", f"{_SWEEP}:close_retired", op="create RETIRED.json")
def _stone(world: World, s: bytes, a: Actor, out: Out) -> None:
    g = at_hand(s, a)
    following = _closed(a)
    if world.variant.mutant not in (Mutant.GRACE_FROM_ROW, Mutant.CLOSED_BEFORE_TOMBSTONE):
        following = following if s[v.ROWS[g] + v.CLOSED] else "closed"

    def torn(t: bytearray) -> bool:
        t[v.FOLDERS[g] + v.STONE] = v.TORN
        return s[v.FOLDERS[g] + v.STONE] == 0

    if world.variant.mutant is Mutant.NO_TOMBSTONE:
        t = bytearray(s)
        goto(t, a, following)
        emit(out, s, t, a, "skips it", g=g, effect=False)
        return

    def do(t: bytearray) -> str:
        return store.create_stone(world.variant, t, g)

    attempt(world, s, a, out, do, lambda t, answer: following if answer == OK else IDLE, Ways(None, None, torn), g=g)


@step(
    "closed",
    "notes in the catalog that the tombstone of {g} is durable",
    f"{_SWEEP}:note_closed",
    transactions.LINKS["note"],
    op="note",
)
def _note_closed(world: World, s: bytes, a: Actor, out: Out) -> None:
    g = at_hand(s, a)
    following = "stone" if world.variant.mutant is Mutant.CLOSED_BEFORE_TOMBSTONE else _closed(a)
    attempt(world, s, a, out, lambda t: transactions.note(t, g), lambda t, _: following, g=g)


@step(
    "grace",
    "waits for the grace of {g}",
    f"{_GC}:_due",
    f"{_SWEEP}:closed_at",
    "spec/commit-protocol.md#Wait for the grace",
)
def _grace(world: World, s: bytes, a: Actor, out: Out) -> None:
    """Assumed here: an hour outlasts every reader that holds no row and began before the hour."""
    g = at_hand(s, a)
    reading = {CODE[name] for name in ("look_open", "look_reading", "proof_open", "proof_reading")}
    for other in world.actors:
        if other.kind in ("looker", "prover_reader") and s[other.at + v.PC] in reading and s[other.at + v.GEN] == g:
            began_later = bool(s[other.at + v.NOTE])
            if not began_later:
                return
    t = bytearray(s)
    goto(t, a, "remove_manifests")
    emit(out, s, t, a, "it is over", g=g)


@step("gc_next", "gc looks for something to remove", f"{_GC}:collect", f"{_GC}:_due")
def _gc_next(world: World, s: bytes, a: Actor, out: Out) -> None:
    if behind(s):
        return
    for g, (row, folder) in enumerate(zip(v.ROWS, v.FOLDERS, strict=True)):
        objects = s[folder + v.PACKS] | s[folder + v.PARTS] | s[folder + v.MANIFESTS]
        following = {
            v.ABORTED: "gc_slot",
            # What is noted is durable: it is only looked at.
            v.RETIRED: "grace" if s[row + v.CLOSED] and s[folder + v.STONE] == v.STONE_WHOLE else _to_close(world),
            v.DELETED: "remove_manifests" if objects else "",
        }.get(s[row + v.STATE], "")
        if following:
            t = bytearray(s)
            t[a.at + v.GEN], t[a.at + v.HELD] = g, s[v.FENCE]
            goto(t, a, following)
            emit(out, s, t, a, "finds it", g=g)


@step("gc_slot", "gc reads the verdict slot of the aborted {g}", f"{_GC}:_proven")
def _gc_slot(world: World, s: bytes, a: Actor, out: Out) -> None:
    g = at_hand(s, a)
    found = s[v.FOLDERS[g] + v.COMMIT]
    damaged = found == v.TORN or found >= v.TORN_LONG
    t = bytearray(s)
    if v.proves(found) and s[v.FOLDERS[g] + v.STONE]:
        goto(t, a, "grace" if s[v.ROWS[g] + v.CLOSED] else "closed")
        emit(out, s, t, a, "committed, and retired since", g=g)
        return
    goto(t, a, "gc_next" if damaged else "adopt" if v.proves(found) else "close_slot")
    emit(out, s, t, a, "damaged" if damaged else "committed" if v.proves(found) else "aborted or empty", g=g)


@step("close_slot", "closes the verdict slot of {g} as aborted", f"{_SWEEP}:close_aborted", op="create COMMIT.json")
def _close_slot(world: World, s: bytes, a: Actor, out: Out) -> None:
    g = a.generation if a.kind == "saver" else at_hand(s, a)
    slot = v.FOLDERS[g] + v.COMMIT
    if world.variant.mutant is Mutant.NO_VERDICT_SLOT:
        t = bytearray(s)
        goto(t, a, "remove_manifests")
        emit(out, s, t, a, "skips it", g=g, effect=False)
        return

    def late(t: bytearray) -> None:
        t[v.LATE[g] + v.LATE_VERDICT] = v.ABORTED_VERDICT

    def torn(t: bytearray) -> bool:
        t[slot] = v.TORN
        return s[slot] == 0

    def then(t: bytearray, answer: str) -> str:
        if answer == OK:
            return "remove_manifests"
        return "adopt" if a.kind == "gc" and v.proves(t[slot]) else _after_sweep(a)

    def do(t: bytearray) -> str:
        return store.create_verdict(world.variant, t, g, v.ABORTED_VERDICT)

    attempt(world, s, a, out, do, then, Ways(None, late, torn), g=g)
    tear_long(world, s, a, out, g, v.ABORTED_VERDICT)


@step("remove_manifests", "deletes the manifests of {g}", f"{_SWEEP}:remove", op="delete manifest")
def _remove_manifests(world: World, s: bytes, a: Actor, out: Out) -> None:
    g = at_hand(s, a)
    t = bytearray(s)
    store.remove_manifests(t, g)
    removed = t != s
    goto(t, a, "remove_data")
    emit(out, s, t, a, "done" if removed else "there were none", g=g, effect=removed)


@step("remove_data", "deletes the packs and parts of {g}", f"{_SWEEP}:remove", op="delete data")
def _remove_data(world: World, s: bytes, a: Actor, out: Out) -> None:
    g = at_hand(s, a)
    t = bytearray(s)
    store.remove_data(t, g)
    removed = t != s
    goto(t, a, "swept")
    emit(out, s, t, a, "done" if removed else "there were none", g=g, effect=removed)


@step("swept", "notes that {g} is deleted", f"{_SWEEP}:remove", transactions.LINKS["mark_swept"], op="mark_swept")
def _swept(world: World, s: bytes, a: Actor, out: Out) -> None:
    g = at_hand(s, a)
    attempt(world, s, a, out, lambda t: transactions.mark_swept(t, g), lambda t, _: _after_sweep(a), g=g)
