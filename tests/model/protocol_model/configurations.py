"""What is explored. Together the configurations cover every pair of actors, and of an actor and a fault."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Final

from protocol_model.actors import ROLES
from protocol_model.variant import Fault, Limit, Mutant, Variant

_A = ("A.0", "A.1")
_KEEP = ("A.0", "gc", "retire")


def _variant(name: str, actors: tuple[str, ...], *faults: Fault, parent: bool = False, parents: int = 1) -> Variant:
    ranks = 2 if "A.1" in actors else 1
    return Variant(name, actors, frozenset(faults), ranks=ranks, parents=parents, parent_exists=parent)


_TAKEN_OVER = ("A.0", "A.watchdog", "B", "B.0")
_SETTLED = ("A.0", "recover", "prover", "gc")
_READ = (*_KEEP, "reader", "looker")
_READ_BY_PROOF = (*_KEEP, "reader by proof")

SOUND: Final = (
    _variant("two launches of two ranks", (*_A, "B", "B.0", "B.1")),
    _variant("two mergers, a takeover and recover", (*_A, "B", "recover"), parents=2),
    _variant("two mergers, a takeover and gc", (*_A, "B", "gc"), Fault.TORN, parents=2),
    _variant("two mergers, lost answers", (*_A, "B"), Fault.LOST, parents=2),
    _variant("two mergers, late requests", (*_A, "B"), Fault.LATE),
    _variant("two mergers, deadlines", (*_A, "B", "gc"), Fault.DEADLINE),
    _variant("two mergers, put back", (*_A, "B"), Fault.ROLLBACK),
    _variant("a writer hangs", (*_TAKEN_OVER, "gc"), parents=2),
    _variant("taken over twice", ("A.0", "B", "B.0", "recover", "prover")),
    _variant("a writer hangs, and recover", ("A.0", "A.watchdog", "recover", "prover")),
    _variant("kept while taken over", ("A.0", "B", "B.0", "gc", "retire"), parent=True),
    _variant("kept while recovered", (*_SETTLED, "retire"), parent=True),
    _variant("read while kept", (*_READ, "reader by proof"), parent=True),
    _variant("read while taken over", ("A.0", "B", "B.0", "reader"), parent=True),
    _variant("looked at while taken over", ("A.0", "B", "B.0", "looker"), parent=True),
    _variant("read by proof while taken over", ("A.0", "B", "B.0", "reader by proof"), parent=True),
    _variant("read while recovered", ("A.0", "recover", "prover", "reader", "looker"), parent=True),
    _variant("read by proof while recovered", ("A.0", "recover", "prover", "reader by proof"), parent=True),
    _variant("a writer hangs, and readers", ("A.0", "A.watchdog", "reader", "looker", "reader by proof"), parent=True),
    _variant("a writer hangs, and retirement", ("A.0", "A.watchdog", "gc", "retire"), parent=True),
    _variant("taken over, lost and torn", _TAKEN_OVER, Fault.LOST, Fault.TORN),
    _variant("settled, lost and torn", _SETTLED, Fault.LOST, Fault.TORN),
    _variant("read, lost and torn", _READ, Fault.LOST, Fault.TORN, parent=True),
    _variant("read by proof, lost and torn", _READ_BY_PROOF, Fault.LOST, Fault.TORN, parent=True),
    replace(_variant("taken over, one late at a time", _TAKEN_OVER, Fault.LATE), one_late=True),
    _variant("a writer hangs, late", ("A.0", "A.watchdog", "B"), Fault.LATE),
    _variant("settled, late", _SETTLED, Fault.LATE),
    _variant("read, late", _READ, Fault.LATE, parent=True),
    _variant("read by proof, late and torn", _READ_BY_PROOF, Fault.LATE, Fault.TORN, parent=True),
    _variant("taken over, deadlines and lost", _TAKEN_OVER, Fault.DEADLINE, Fault.LOST),
    _variant("settled, deadlines and torn", _SETTLED, Fault.DEADLINE, Fault.TORN),
    _variant("read, deadlines", _READ, Fault.DEADLINE, parent=True),
    _variant("read by proof, deadlines", _READ_BY_PROOF, Fault.DEADLINE, parent=True),
    _variant("all that storage does", ("A.0", "B"), Fault.LATE, Fault.LOST, Fault.TORN, Fault.DEADLINE),
    _variant("taken over, put back", _TAKEN_OVER, Fault.ROLLBACK),
    _variant("settled, put back", _SETTLED, Fault.ROLLBACK),
    _variant("read, put back", ("A.0", "retire", "gc", "reader"), Fault.ROLLBACK, parent=True),
    _variant("looked at, put back", ("A.0", "retire", "gc", "looker"), Fault.ROLLBACK, parent=True),
    _variant("read by proof, put back", _READ_BY_PROOF, Fault.ROLLBACK, parent=True),
    _variant("put back, late", ("A.0", "gc"), Fault.ROLLBACK, Fault.LATE),
    _variant("put back, lost and torn", ("A.0", "B"), Fault.ROLLBACK, Fault.LOST, Fault.TORN),
    _variant("put back, deadlines", ("A.0", "B", "gc"), Fault.ROLLBACK, Fault.DEADLINE),
)
"""Each of these must be explored to its end without a broken promise."""


def _broken(mutant: Mutant, actors: tuple[str, ...], *faults: Fault, parent: bool = False, parents: int = 1) -> Variant:
    ranks = 2 if "A.1" in actors else 1
    return Variant(mutant.name, actors, frozenset(faults), ranks, parents, parent, mutant)


_CALLED: Final = "the catalog calls a generation committed whose data is not all there"
_PROVED: Final = "storage proves a generation whose data is not all there"
_UNPROVEN: Final = "a save reported as proven cannot be opened by proof"
_WEDGED: Final = "a generation of an older launch is still open: recover is wedged"
_LACKS: Final = "reads a generation that lacks a rank's data"

MUTANTS: Final = {
    _broken(Mutant.FENCE_ON_ROW, (*_A, "B")): "a fenced launch committed",
    _broken(Mutant.REPORT_BEFORE_C5, _A): _UNPROVEN,
    _broken(Mutant.NO_VERDICT_SLOT, ("A.0", "A.watchdog", "gc"), Fault.ROLLBACK): _CALLED,
    _broken(Mutant.NO_TOMBSTONE, (*_A, "gc", "retire", "reader by proof"), parent=True): _PROVED,
    _broken(Mutant.MANIFEST_FIXED_NAME, (*_A, "B"), parents=2): _WEDGED,
    _broken(Mutant.NO_HEALING, (*_A, "B"), Fault.TORN): _WEDGED,
    _broken(Mutant.NO_GATHER, (*_A, "B")): _CALLED,
    _broken(Mutant.PROOF_BEFORE_COMMIT, (*_A, "B")): "storage proves a generation that was never committed",
    _broken(Mutant.FAILED_WITHOUT_SWAP, (*_A, "B")): "a save was said to have failed and is committed",
    _broken(Mutant.SETTLE_AFTER_RESTORE, (*_A, "B")): "a save was committed after a newer launch had restored",
    _broken(Mutant.GRACE_FROM_ROW, (*_KEEP, "reader by proof"), parent=True): f"reader by proof {_LACKS}",
    _broken(Mutant.CLOSED_BEFORE_TOMBSTONE, (*_KEEP, "reader by proof"), parent=True): f"reader by proof {_LACKS}",
    _broken(Mutant.ADOPT_BEFORE_HINT, ("A.0", "B"), Fault.ROLLBACK): _UNPROVEN,
    _broken(Mutant.NO_READER_RULE, (*_KEEP, "reader"), parent=True): f"reader {_LACKS}",
}
"""One broken rule each -> the promise that it breaks, which the explorer must find."""


def _limit(limit: Limit, actors: tuple[str, ...], *faults: Fault) -> Variant:
    return Variant(f"not promised: {limit}", actors, frozenset((Fault.ROLLBACK, *faults)), ranks=1, promised=limit)


LIMITS: Final = {
    "a save was said to have failed and is committed": _limit(Limit.FAILED, ("A.0", "A.watchdog")),
    "a fenced launch committed": _limit(Limit.FENCED, ("A.0", "recover")),
    "data is not all there": _limit(Limit.SWEPT, ("A.0", "gc"), Fault.LATE),
    "recover": _limit(Limit.NUMBERED_TWICE, ("A.0", "B", "B.0")),
}
"""What cannot be promised once the catalog was put back and nobody has noticed: broken promise -> how to see it."""

_ENVIRONMENT: Final = frozenset({"late requests", "deadline", "catalog", "operator"})


def kind_of(actor: str) -> str:
    """Ranks of one launch count as one."""
    return "A" if actor in _A else "B's ranks" if actor in ("B.0", "B.1") else actor


def pairs_covered() -> set[frozenset[str]]:
    """Pairs of actors, and of an actor and a fault, that some configuration explores together."""
    found = set()
    for variant in SOUND:
        names = {kind_of(actor) for actor in variant.actors}
        found |= {frozenset(pair) for pair in combinations(sorted(names), 2)}
        found |= {frozenset((name, fault.name)) for name in names for fault in variant.faults}
        found |= {frozenset(pair) for pair in combinations(sorted(fault.name for fault in variant.faults), 2)}
    return found


def pairs_wanted() -> set[frozenset[str]]:
    names = sorted({kind_of(actor) for actor in ROLES if actor not in _ENVIRONMENT})
    faults = sorted(fault.name for fault in Fault)
    wanted = {frozenset(pair) for pair in combinations(names, 2)}
    wanted |= {frozenset((name, fault)) for name in names for fault in faults}
    return wanted | {frozenset(pair) for pair in combinations(faults, 2)}
