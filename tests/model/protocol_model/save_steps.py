"""C1 and C2 of a rank, and C3 to C5 as anybody does them."""

from __future__ import annotations

from protocol_model import store, transactions
from protocol_model import vector as v
from protocol_model.machine import IDLE, Actor, Out, Ways, World, attempt, emit, goto, step
from protocol_model.transactions import OK
from protocol_model.variant import Fault, Mutant

_SESSION = "ckptfmt.engine.save.session:SaveSession"


def _failing(a: Actor) -> str | None:
    """Where an actor goes on when a step of C1 to C5 fails: a save seeks its verdict, others stop."""
    return "verdict" if a.kind == "saver" else None


def _or_fail(a: Actor, answer: str, following: str) -> str:
    return following if answer == OK else _failing(a) or IDLE


@step("begin", "C1: begins {g}", f"{_SESSION}._begin", transactions.LINKS["begin"], op="begin_save")
def _begin(world: World, s: bytes, a: Actor, out: Out) -> None:
    g, fence = a.generation, s[a.at + v.HELD]

    def then(t: bytearray, answer: str) -> str:
        if answer == OK:
            return "pack"
        t[v.GHOSTS[g] + v.FAILED] = 1  # "it could not begin"
        return IDLE

    attempt(world, s, a, out, lambda t: transactions.begin(world.variant, t, g, fence), then, g=g)


@step(
    "pack",
    "C2: writes its pack of {g} and makes it durable",
    f"{_SESSION}._persist",
    "ckptfmt.engine.save.writing:Writing._check_still_writing",
    "ckptfmt.engine.save.persist:write_packs",
    op="finish pack",
)
def _pack(world: World, s: bytes, a: Actor, out: Out) -> None:
    g, bit = a.generation, 1 << a.rank

    def do(t: bytearray) -> str:
        store.put(t, g, v.PACKS, bit)
        return OK

    def late(t: bytearray) -> None:
        t[v.LATE[g] + v.LATE_PACKS] |= bit

    attempt(world, s, a, out, do, lambda t, _: "part", Ways("verdict", late), g=g)


@step("part", "C2: creates its part of {g}", f"{_SESSION}._persist", op="create part")
def _part(world: World, s: bytes, a: Actor, out: Out) -> None:
    g, bit = a.generation, 1 << a.rank

    def do(t: bytearray) -> str:
        store.put(t, g, v.PARTS, bit)
        return OK

    def late(t: bytearray) -> None:
        t[v.LATE[g] + v.LATE_PARTS] |= bit

    attempt(world, s, a, out, do, lambda t, _: "acknowledge", Ways("verdict", late), g=g)


@step(
    "acknowledge",
    "C2: acknowledges its part of {g}",
    "ckptfmt.engine.save.alone:Alone.report",
    transactions.LINKS["report_rank"],
    op="report_rank",
)
def _acknowledge(world: World, s: bytes, a: Actor, out: Out) -> None:
    g = a.generation
    attempt(
        world,
        s,
        a,
        out,
        lambda t: transactions.report_rank(t, g, a.rank),
        lambda t, answer: _or_fail(a, answer, "merge"),
        Ways("verdict"),
        g=g,
    )


# -- C3 to C5, for savers, a takeover and recover alike ---------------------------------------------
@step(
    "merge",
    "C3: finds every rank's acknowledgement of {g}, reads the parts, sees the packs, and derives the manifest",
    "ckptfmt.engine.save.alone:Alone.gathered",
    "ckptfmt.engine.protocol:merged_manifest",
    "ckptfmt.engine.protocol:parent_of",
)
def _merge(world: World, s: bytes, a: Actor, out: Out) -> None:
    g = at_hand(s, a)
    folder = v.FOLDERS[g]
    acknowledged = s[v.ROWS[g] + v.ACKS]
    every = world.variant.every_rank if world.variant.mutant is not Mutant.NO_GATHER else acknowledged
    if acknowledged & s[folder + v.PARTS] & s[folder + v.PACKS] & every == every:
        for content in range(1, (1 if world.alone else world.variant.parents) + 1):
            t = bytearray(s)
            t[a.at + v.NOTE] = content
            goto(t, a, "manifest")
            emit(out, s, t, a, f"content {content}", g=g)
    elif a.kind != "saver":
        t = bytearray(s)
        goto(t, a, "settle_abort")
        emit(out, s, t, a, "something is missing", g=g, effect=False)
    if a.kind == "saver":
        t = bytearray(s)
        goto(t, a, "verdict")
        emit(out, s, t, a, "fails, or gives up waiting", g=g, effect=False)


@step("manifest", "C3: creates the manifest of {g}", "ckptfmt.engine.protocol:merge", op="create manifest")
def _manifest(world: World, s: bytes, a: Actor, out: Out) -> None:
    g, content = s[a.at + v.GEN], s[a.at + v.NOTE]
    bit = 1 << (content - 1)

    def late(t: bytearray) -> None:
        t[v.LATE[g] + v.LATE_MANIFESTS] |= bit

    def torn(t: bytearray) -> bool:
        folder = v.FOLDERS[g]
        if (s[folder + v.MANIFESTS] | s[folder + v.TORN_MANIFESTS]) & bit:
            return False
        t[folder + v.TORN_MANIFESTS] |= bit
        return True

    attempt(
        world,
        s,
        a,
        out,
        lambda t: store.create_manifest(world.variant, t, g, content),
        lambda t, answer: _or_fail(a, answer, "durable"),
        Ways(_failing(a), late, torn),
        g=g,
    )


@step(
    "durable",
    "C3: moves {g} to durable",
    "ckptfmt.engine.protocol:merge",
    transactions.LINKS["mark_durable"],
    op="mark_durable",
)
def _durable(world: World, s: bytes, a: Actor, out: Out) -> None:
    g, fence, content = s[a.at + v.GEN], s[a.at + v.HELD], s[a.at + v.NOTE]

    def then(t: bytearray, answer: str) -> str:
        if answer == OK and world.variant.mutant is Mutant.PROOF_BEFORE_COMMIT:
            _prove_too_early(t, g)
        return _or_fail(a, answer, "commit")

    attempt(
        world,
        s,
        a,
        out,
        lambda t: transactions.mark_durable(world.variant, t, g, fence, content),
        then,
        Ways(_failing(a)),
        g=g,
    )


def _prove_too_early(t: bytearray, g: int) -> None:
    facts = bytearray(t)
    facts[v.ROWS[g] + v.SEQ], facts[v.ROWS[g] + v.ROW_EPOCH] = t[v.NEXT_SEQ], t[v.EPOCH]
    facts[v.ROWS[g] + v.C4_NUMBER] = 1
    if t[v.FOLDERS[g] + v.COMMIT] == 0:
        t[v.FOLDERS[g] + v.COMMIT] = v.committed_verdict(facts, g)


@step("commit", "C4: commits {g}", "ckptfmt.engine.protocol:commit", transactions.LINKS["commit"], op="commit")
def _commit(world: World, s: bytes, a: Actor, out: Out) -> None:
    g, fence = s[a.at + v.GEN], s[a.at + v.HELD]

    def then(t: bytearray, answer: str) -> str:
        if answer == OK and a.kind == "saver" and world.variant.mutant is Mutant.REPORT_BEFORE_C5:
            t[v.GHOSTS[g] + v.REPORTED] = v.PROVEN_REPORT
        return prove_row(t, a, g) if answer == OK else _failing(a) or IDLE

    def late(t: bytearray) -> None:
        t[v.LATE[g] + v.LATE_C4] = fence

    attempt(
        world,
        s,
        a,
        out,
        lambda t: transactions.commit(world.variant, t, g, fence),
        then,
        Ways(_failing(a), late),
        g=g,
    )


def at_hand(s: bytes | bytearray, a: Actor) -> int:
    return s[a.at + v.GEN]


def prove_row(t: bytearray, a: Actor, g: int) -> str:
    """Go on to C5 with the row as the catalog has just shown it: the catalog may be put back meanwhile."""
    t[a.at + v.GEN], t[a.at + v.NOTE] = g, v.committed_verdict(t, g)
    return "prove"


def after_proof(a: Actor) -> str:
    following = {"launcher": "settle_next", "recover": "settle_next", "prover": "prove_next", "gc": "gc_next"}
    return following.get(a.kind, IDLE)


def _proof_pending(t: bytearray, a: Actor) -> str:
    """Storage refuses the proof: the row is committed all the same, and recover finishes it."""
    if a.kind == "saver":
        ghost = v.GHOSTS[at_hand(t, a)] + v.REPORTED
        t[ghost] = max(t[ghost], v.PENDING_REPORT)
    return after_proof(a)


def _proving(world: World, s: bytes, a: Actor, out: Out) -> None:
    """The other way that every step of C5 can go: storage refuses for too long."""
    if world.alone:
        return
    t = bytearray(s)
    goto(t, a, _proof_pending(t, a))
    emit(out, s, t, a, "is refused for too long; the proof stays pending", g=at_hand(s, a), effect=False)


@step("prove", "C5: creates COMMIT.json of {g}", "ckptfmt.engine.protocol:prove", op="create COMMIT.json")
def _prove(world: World, s: bytes, a: Actor, out: Out) -> None:
    g = at_hand(s, a)
    value = s[a.at + v.NOTE]
    slot = v.FOLDERS[g] + v.COMMIT

    def late(t: bytearray) -> None:
        t[v.LATE[g] + v.LATE_VERDICT] = value

    def tearing(beginning: int) -> Ways:
        def torn(t: bytearray) -> bool:
            t[slot] = beginning
            return s[slot] == 0

        return Ways(None, late, torn)

    def then(t: bytearray, answer: str) -> str:
        if answer == OK:
            return "hint"
        # Nobody calls it saved: its handle says that the outcome is unknown.
        return after_proof(a) if t[slot] == v.ABORTED_VERDICT else _proof_pending(t, a)

    attempt(world, s, a, out, lambda t: store.create_verdict(world.variant, t, g, value), then, tearing(v.TORN), g=g)
    tear_long(world, s, a, out, g, value)
    _proving(world, s, a, out)


def tear_long(world: World, s: bytes, a: Actor, out: Out, g: int, value: int) -> None:
    """A create in place of a verdict that dies after bytes which only this verdict begins with."""
    slot = v.FOLDERS[g] + v.COMMIT
    if world.has(Fault.TORN) and s[slot] in (0, v.TORN):
        t = bytearray(s)
        t[slot] = v.TORN_LONG + value
        goto(t, a, IDLE)
        emit(out, s, t, a, "is torn late in the object: the process dies", g=g, effect=False)


@step("hint", "C5: creates the commit hint of {g}", "ckptfmt.engine.protocol:prove", op="create hint")
def _hint(world: World, s: bytes, a: Actor, out: Out) -> None:
    g = at_hand(s, a)

    def do(t: bytearray) -> str:
        t[v.FOLDERS[g] + v.HINT] = 1
        return OK

    attempt(world, s, a, out, do, lambda t, _: "set_proven", g=g)
    _proving(world, s, a, out)


@step(
    "set_proven",
    "C5: notes in the catalog that {g} is proven, and reports it",
    "ckptfmt.engine.protocol:prove",
    f"{_SESSION}._report",
    transactions.LINKS["set_proven"],
    op="set_proven",
)
def _set_proven(world: World, s: bytes, a: Actor, out: Out) -> None:
    g = at_hand(s, a)

    def then(t: bytearray, answer: str) -> str:
        if a.kind == "saver" and answer == OK:
            t[v.GHOSTS[g] + v.REPORTED] = v.PROVEN_REPORT
        return after_proof(a)

    attempt(world, s, a, out, lambda t: transactions.set_proven(t, g), then, g=g)
    _proving(world, s, a, out)
