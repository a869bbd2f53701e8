"""Who may take part, where it begins, and the state before anything happens."""

from __future__ import annotations

from typing import Final

from protocol_model import environment_steps, keep_steps, read_steps, save_steps, settle_steps, verdict_steps
from protocol_model import vector as v
from protocol_model.machine import CODE, IDLE, Actor, World
from protocol_model.variant import Fault, Variant

STEP_ROOMS: Final = (environment_steps, keep_steps, read_steps, save_steps, settle_steps, verdict_steps)
"""Importing them registers every step."""

ROLES: Final = {
    "A.0": ("saver", 0, 0, "begin"),
    "A.1": ("saver", 0, 1, "begin"),
    "A.watchdog": ("watchdog", 0, 0, "watch"),
    "B": ("launcher", 1, 0, "acquire"),
    "B.0": ("saver", 1, 0, IDLE),
    "B.1": ("saver", 1, 1, IDLE),
    "recover": ("recover", 0, 0, "acquire"),
    "prover": ("prover", 0, 0, "prove_next"),
    "gc": ("gc", 0, 0, "gc_next"),
    "retire": ("retire", 0, 0, "retire"),
    "reader": ("reader", 0, 0, "read_choose"),
    "looker": ("looker", 0, 0, "look_choose"),
    "reader by proof": ("prover_reader", 0, 0, "proof_choose"),
    "late requests": ("environment", 0, 0, "land"),
    "deadline": ("environment", 0, 0, "deadline"),
    "catalog": ("environment", 0, 0, "put_back"),
    "operator": ("environment", 0, 0, "rebuild"),
}
"""name: (kind, launch, rank, first step). B's ranks begin when B has restored."""
_OF_FAULT: Final = {
    Fault.LATE: ("late requests",),
    Fault.DEADLINE: ("deadline",),
    Fault.ROLLBACK: ("catalog", "operator"),
}


def world_of(variant: Variant) -> World:
    names = list(variant.actors)
    for fault, added in _OF_FAULT.items():
        if variant.has(fault):
            names += added
    actors = []
    for position, name in enumerate(names):
        kind, launch, rank, _ = ROLES[name]
        actors.append(Actor(name, kind, v.ACTORS + v.ACTOR_FIELDS * position, launch, rank))
    return World(variant, tuple(actors))


def first_state(world: World) -> bytes:
    """Launch A holds the run (fence 1) and begins its save; a parent may be committed already."""
    s = bytearray(v.ACTORS + v.ACTOR_FIELDS * len(world.actors))
    s[v.FENCE] = s[v.FENCE_MAX] = s[v.NEXT_SEQ] = s[v.EPOCH] = 1
    s[v.RESTORED] = 1
    for actor in world.actors:
        s[actor.at + v.PC] = CODE[ROLES[actor.name][3]]
        if actor.kind == "saver" and s[actor.at + v.PC] != CODE[IDLE]:
            s[actor.at + v.GEN] = actor.generation
        if actor.kind in ("saver", "watchdog") and actor.launch == 0:
            s[actor.at + v.HELD] = 1
    if world.variant.parent_exists:
        _add_parent(s, world.variant.every_rank)
    return bytes(s)


def _add_parent(s: bytearray, every_rank: int) -> None:
    row, folder = v.ROWS[v.PARENT], v.FOLDERS[v.PARENT]
    s[row + v.STATE] = v.COMMITTED
    s[row + v.ACKS] = s[folder + v.PACKS] = s[folder + v.PARTS] = every_rank
    s[row + v.MANIFEST] = s[row + v.SEQ] = s[row + v.ROW_EPOCH] = s[row + v.C4_NUMBER] = s[row + v.PROVEN] = 1
    s[folder + v.MANIFESTS] = s[folder + v.HINT] = 1
    s[folder + v.COMMIT] = v.committed_verdict(s, v.PARENT)
    s[v.NEXT_SEQ] = 2
    s[v.GHOSTS[v.PARENT] + v.REPORTED] = v.PROVEN_REPORT
    s[v.GHOSTS[v.PARENT] + v.C4_COUNT] = 1
