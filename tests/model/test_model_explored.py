"""The commit protocol, explored exhaustively (``make model``): no promise is broken, and every broken rule is found."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import pytest
from protocol_model.configurations import LIMITS, MUTANTS, SOUND, pairs_covered, pairs_wanted
from protocol_model.explorer import Found, explore
from protocol_model.machine import IDLE, STEPS
from protocol_model.reporting import TITLE, report
from protocol_model.variant import Mutant, Variant

STATES_EXPECTED: dict[str, int] = {
    "two launches of two ranks": 384_577,
    "two mergers, a takeover and recover": 164_588,
    "two mergers, a takeover and gc": 45_810,
    "two mergers, lost answers": 14_208,
    "two mergers, late requests": 409_183,
    "two mergers, deadlines": 46_641,
    "two mergers, put back": 110_070,
    "a writer hangs": 227_478,
    "taken over twice": 376_112,
    "a writer hangs, and recover": 3_963,
    "kept while taken over": 65_960,
    "kept while recovered": 8_465,
    "read while kept": 13_475,
    "read while taken over": 22_288,
    "looked at while taken over": 16_130,
    "read by proof while taken over": 18_925,
    "read while recovered": 32_451,
    "read by proof while recovered": 6_342,
    "a writer hangs, and readers": 8_586,
    "a writer hangs, and retirement": 592,
    "taken over, lost and torn": 31_215,
    "settled, lost and torn": 6_726,
    "read, lost and torn": 8_523,
    "read by proof, lost and torn": 2_729,
    "taken over, one late at a time": 133_683,
    "a writer hangs, late": 38_296,
    "settled, late": 102_122,
    "read, late": 108_828,
    "read by proof, late and torn": 44_228,
    "taken over, deadlines and lost": 30_142,
    "settled, deadlines and torn": 8_951,
    "read, deadlines": 4_925,
    "read by proof, deadlines": 1_603,
    "all that storage does": 26_462,
    "taken over, put back": 336_323,
    "settled, put back": 121_738,
    "read, put back": 29_770,
    "looked at, put back": 10_050,
    "read by proof, put back": 14_767,
    "put back, late": 116_662,
    "put back, lost and torn": 16_391,
    "put back, deadlines": 114_470,
}
"""As counted when the configurations were written. Fewer mean that something is not explored any more."""
MARGIN = 0.95

Explored = dict[Variant, Found]


@pytest.fixture(scope="module")
def explored(tell: Callable[[str, str], None]) -> Explored:
    """Everything, explored in as many processes as there are cores for it: the largest first."""
    variants = [*SOUND, *MUTANTS, *LIMITS.values()]
    variants.sort(key=lambda variant: -STATES_EXPECTED.get(variant.name, 0))
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        found = dict(zip(variants, pool.map(explore, variants), strict=True))
    for variant in (*SOUND, *MUTANTS, *LIMITS.values()):
        for line in report(found[variant]):
            tell(TITLE, line)
    return found


@pytest.mark.model
@pytest.mark.timeout(900)
@pytest.mark.parametrize("variant", SOUND, ids=lambda variant: variant.name)
def test_no_promise_is_broken(explored: Explored, variant: Variant) -> None:
    found = explored[variant]
    assert found.broken is None, "\n".join(report(found))
    assert found.states >= STATES_EXPECTED[variant.name] * MARGIN


@pytest.mark.model
@pytest.mark.timeout(900)
@pytest.mark.parametrize("variant", MUTANTS, ids=lambda variant: variant.name)
def test_a_broken_rule_is_found(explored: Explored, variant: Variant) -> None:
    """By the promise that it breaks: another one would say that the model is wrong elsewhere."""
    found = explored[variant]
    assert MUTANTS[variant] in (found.broken or ""), "\n".join(report(found))
    assert len(found.trace) > 3


@pytest.mark.model
@pytest.mark.timeout(900)
@pytest.mark.parametrize("promise", LIMITS)
def test_what_cannot_be_promised_once_the_catalog_forgot_it(explored: Explored, promise: str) -> None:
    """Stated as a limit, so it has to be one: should it go away, the page is to be changed."""
    assert promise in (explored[LIMITS[promise]].broken or "")


@pytest.mark.model
def test_every_step_is_taken(explored: Explored) -> None:
    taken = {name for variant in SOUND for name in explored[variant].taken}
    assert taken == {step.name for step in STEPS if step.name != IDLE}


def test_every_rule_has_its_mutant_and_every_pair_its_configuration() -> None:
    assert {variant.mutant for variant in MUTANTS} == set(Mutant)
    assert set(STATES_EXPECTED) == {variant.name for variant in SOUND}
    assert pairs_wanted() <= pairs_covered(), sorted(map(sorted, pairs_wanted() - pairs_covered()))


def test_a_mutant_differs_from_the_protocol_by_its_rule_alone() -> None:
    """The same small configuration without the mutant is sound."""
    for variant in [*MUTANTS][1:6:4]:
        assert MUTANTS[variant] in (explore(variant).broken or "")
        assert explore(replace(variant, mutant=None)).broken is None
