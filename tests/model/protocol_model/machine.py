"""How programs are written: steps, actors, and the ways in which one shared operation can go.

An actor's program counter names the step that it does next. A step appends what may follow to ``out``. It touches
shared state once, so that everything another actor could see between two operations is a state of the model.
A crash is not a step: a process that is never scheduled again is a crashed one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from protocol_model import vector as v
from protocol_model.variant import Fault, Variant


@dataclass(frozen=True)
class Actor:
    """One process of the model. ``at`` is where its fields begin in the state."""

    name: str
    kind: str
    at: int
    launch: int = 0
    """0 for launch A, 1 for launch B."""
    rank: int = 0

    @property
    def generation(self) -> int:
        """What a saver of this launch saves."""
        return v.FIRST + self.launch


@dataclass(frozen=True)
class Event:
    """One transition: who did which step, how it went, and with which generation (-1: none)."""

    actor: str
    step: str
    outcome: str
    generation: int
    effect: bool
    """Whether the operation took effect in this transition (a recorded trace shows it)."""
    launch: int = -1
    rank: int = -1


@dataclass
class World:
    """A variant with its actors; what a step needs to know beside the state."""

    variant: Variant
    actors: tuple[Actor, ...] = ()
    alone: bool = False
    """Only one actor moves, and nothing goes wrong: how recover is tried from any state."""

    def has(self, fault: Fault) -> bool:
        return not self.alone and self.variant.has(fault)


Out = list[tuple[Event, bytearray]]
Body = Callable[[World, bytes, Actor, Out], None]


@dataclass(frozen=True)
class Step:
    name: str
    words: str
    """What happens, for a trace: ``{g}`` is the generation."""
    links: tuple[str, ...]
    """Functions of the library (``module:qualified.name``), or lines of a page (``page#words on it``)."""
    body: Body = field(compare=False)
    op: str | None = None
    """How a recorded trace names it: the catalog's or backend's method and the kind of object."""


STEPS: Final[list[Step]] = []
CODE: Final[dict[str, int]] = {}
IDLE: Final = "idle"
"""Done, dead or not yet begun: the actor has no next step."""


def step(name: str, words: str, *links: str, op: str | None = None) -> Callable[[Body], Body]:
    """Register the step that an actor does while its program counter is ``CODE[name]``."""

    def register(body: Body) -> Body:
        if name in CODE:
            raise AssertionError(f"two steps are called {name}")
        CODE[name] = len(STEPS)
        STEPS.append(Step(name, words, links, body, op))
        return body

    return register


@step(IDLE, "does nothing more", "spec/commit-protocol.md#crash between any two operations")
def _idle(world: World, s: bytes, a: Actor, out: Out) -> None:
    """Nothing follows."""


_FORGETS: Final = {
    IDLE: (v.GEN, v.HELD, v.NOTE),
    "verdict": (v.NOTE,),
    "close_slot": (v.NOTE,),
    "hint": (v.NOTE,),
    "settle_next": (v.GEN, v.NOTE),
    "settle_abort": (v.NOTE,),
    "prove_next": (v.GEN, v.NOTE),
    "gc_next": (v.GEN, v.HELD, v.NOTE),
    "remove_manifests": (v.HELD, v.NOTE),
    "retire": (v.GEN,),
}
"""What an actor does not need any more when it comes to this step: states that differ only there are one."""


def goto(s: bytearray, a: Actor, name: str) -> None:
    s[a.at + v.PC] = CODE[name]
    for field_ in _FORGETS.get(name, ()):
        s[a.at + field_] = 0


def emit(out: Out, s: bytes, t: bytearray, a: Actor, outcome: str, *, g: int, effect: bool = True) -> None:
    name = STEPS[s[a.at + v.PC]].name
    out.append((Event(a.name, name, outcome, g, effect, a.launch, a.rank), t))


@dataclass(frozen=True)
class Ways:
    """The ways in which one operation can go wrong for its caller."""

    give_up: str | None = None
    """Step at which the caller goes on after an error; None: it stops there (which is a crash, no step)."""
    late: Callable[[bytearray], None] | None = None
    """Puts the request under way, for it to land at any time."""
    torn: Callable[[bytearray], bool] | None = None
    """Leaves a beginning of the object; False if that is not possible now."""


def attempt(
    world: World,
    s: bytes,
    a: Actor,
    out: Out,
    do: Callable[[bytearray], str],
    then: Callable[[bytearray, str], str],
    ways: Ways = Ways(),
    *,
    g: int,
) -> None:
    """Do one shared operation. ``then`` (changed state, answer) gives the next step."""
    t = bytearray(s)
    answer = do(t)
    changed = t != s
    done = bytearray(t)
    goto(done, a, then(done, answer))
    emit(out, s, done, a, answer, g=g)
    if world.alone:
        return
    if world.has(Fault.LOST) and changed:
        emit(out, s, bytearray(t), a, "took effect, the answer is lost, it will be repeated", g=g)
    if ways.give_up is not None:
        without = bytearray(s)
        goto(without, a, ways.give_up)
        emit(out, s, without, a, "fails and is given up", g=g, effect=False)
        if world.has(Fault.LOST) and changed:
            lost = bytearray(t)
            goto(lost, a, ways.give_up)
            emit(out, s, lost, a, "took effect, the answer is lost, it is given up", g=g)
    under_way = world.variant.one_late and any(s[v.LATE[0] : v.GHOSTS[0]])
    if ways.late is not None and world.has(Fault.LATE) and not under_way:
        sent = bytearray(s)
        ways.late(sent)
        if sent != s:
            emit(out, s, sent, a, "is under way and will land late; it is repeated", g=g, effect=False)
            if ways.give_up is not None:
                gone = bytearray(sent)
                goto(gone, a, ways.give_up)
                emit(out, s, gone, a, "is under way and will land late; it is given up", g=g, effect=False)
    if ways.torn is not None and world.has(Fault.TORN):
        torn = bytearray(s)
        if ways.torn(torn):
            goto(torn, a, IDLE)
            emit(out, s, torn, a, "is torn: the process dies in the middle", g=g, effect=False)
