"""Readers: registered in the catalog, with the catalog but without a row, and by proof."""

from __future__ import annotations

from protocol_model import transactions
from protocol_model import vector as v
from protocol_model.machine import Actor, Out, World, emit, goto, step
from protocol_model.save_steps import at_hand
from protocol_model.transactions import OK
from protocol_model.variant import Mutant

READING = ("read_reading", "look_reading", "proof_reading")
"""Steps at which a reader relies on every byte of the generation being there."""
_RESOLVE = "ckptfmt.engine.load.resolve"


def _choose(s: bytes, a: Actor, out: Out, following: str) -> None:
    for g, row in enumerate(v.ROWS):
        if s[row + v.STATE] == v.COMMITTED:
            t = bytearray(s)
            t[a.at + v.GEN], t[a.at + v.NOTE] = g, 0
            goto(t, a, following)
            emit(out, s, t, a, "done", g=g)


def _open(world: World, s: bytes, a: Actor, out: Out, manifest: int, following: str, back: str) -> None:
    g = at_hand(s, a)
    every = packs_named(world, s, g)
    folder = v.FOLDERS[g]
    whole = bool(manifest and s[folder + v.MANIFESTS] >> (manifest - 1) & 1) and s[folder + v.PACKS] & every == every
    t = bytearray(s)
    goto(t, a, following if whole else back)
    emit(out, s, t, a, "all there" if whole else "refused: something is missing", g=g)


def packs_named(world: World, s: bytes, g: int) -> int:
    """The ranks whose packs the manifest names: every one, unless a merger did not wait."""
    return s[v.ROWS[g] + v.ACKS] if world.variant.mutant is Mutant.NO_GATHER else world.variant.every_rank


def _end(s: bytes, a: Actor, out: Out, first: str) -> None:
    t = bytearray(s)
    g = at_hand(s, a)
    if first == "read_choose":
        transactions.close_reader(t, g)
    t[a.at + v.GEN] = t[a.at + v.NOTE] = 0
    goto(t, a, first)
    emit(out, s, t, a, "done", g=g)


@step("read_choose", "chooses the committed {g}", f"{_RESOLVE}:resolve_row")
def _read_choose(world: World, s: bytes, a: Actor, out: Out) -> None:
    _choose(s, a, out, "read_open")


@step("read_open", "opens {g}", "ckptfmt.engine.opened:open_row", "ckptfmt.engine.nearest:Nearest.require")
def _read_open(world: World, s: bytes, a: Actor, out: Out) -> None:
    _open(world, s, a, out, s[v.ROWS[at_hand(s, a)] + v.MANIFEST], "read_register", "read_choose")


@step("read_register", "registers as a reader of {g}", "ckptfmt.reading:_Guard", transactions.LINKS["open_reader"])
def _read_register(world: World, s: bytes, a: Actor, out: Out) -> None:
    t = bytearray(s)
    answer = transactions.open_reader(t, at_hand(s, a))
    goto(t, a, "read_reading" if answer == OK else "read_choose")
    emit(out, s, t, a, answer, g=at_hand(s, a))


@step("read_reading", "has read {g}", "ckptfmt.reading:_Guard", "ckptfmt.catalog.readers:close_reader")
def _read_reading(world: World, s: bytes, a: Actor, out: Out) -> None:
    _end(s, a, out, "read_choose")


@step("look_choose", "chooses the committed {g}, opened read-only", f"{_RESOLVE}:resolve_row")
def _look_choose(world: World, s: bytes, a: Actor, out: Out) -> None:
    _choose(s, a, out, "look_open")


@step("look_open", "opens {g} without registering", "ckptfmt.engine.opened:open_row")
def _look_open(world: World, s: bytes, a: Actor, out: Out) -> None:
    _open(world, s, a, out, s[v.ROWS[at_hand(s, a)] + v.MANIFEST], "look_reading", "look_choose")


@step("look_reading", "has read {g}", "ckptfmt.reading:_Guard")
def _look_reading(world: World, s: bytes, a: Actor, out: Out) -> None:
    _end(s, a, out, "look_choose")


@step("proof_choose", "finds that COMMIT.json proves {g}", f"{_RESOLVE}:_proved")
def _proof_choose(world: World, s: bytes, a: Actor, out: Out) -> None:
    for g, folder in enumerate(v.FOLDERS):
        if s[folder + v.HINT] and v.proves(s[folder + v.COMMIT]):
            t = bytearray(s)
            t[a.at + v.GEN] = g
            goto(t, a, "proof_stone")
            emit(out, s, t, a, "done", g=g)


@step("proof_stone", "looks whether {g} has a tombstone", "ckptfmt.engine.verdicts:read_retired")
def _proof_stone(world: World, s: bytes, a: Actor, out: Out) -> None:
    g = at_hand(s, a)
    there = s[v.FOLDERS[g] + v.STONE] != 0  # a torn one tells as much
    t = bytearray(s)
    from_row = world.variant.mutant is Mutant.GRACE_FROM_ROW
    t[a.at + v.NOTE] = s[v.ROWS[g] + v.STATE] == v.RETIRED if from_row else s[v.ROWS[g] + v.CLOSED]
    goto(t, a, "proof_choose" if there else "proof_open")
    emit(out, s, t, a, "it has one" if there else "it has none", g=g)


@step("proof_open", "opens {g} by proof", "ckptfmt.engine.opened:open_proven", "ckptfmt.engine.nearest:Nearest.require")
def _proof_open(world: World, s: bytes, a: Actor, out: Out) -> None:
    found = s[v.FOLDERS[at_hand(s, a)] + v.COMMIT]
    _open(world, s, a, out, v.verdict_facts(found)[2] if v.proves(found) else 0, "proof_reading", "proof_choose")


@step("proof_reading", "has read {g}", "spec/commit-protocol.md#Without it")
def _proof_reading(world: World, s: bytes, a: Actor, out: Out) -> None:
    _end(s, a, out, "proof_choose")
