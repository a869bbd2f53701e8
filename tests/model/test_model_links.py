"""The model speaks of the library: every step names what it stands for, and that exists."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from protocol_model import actors, transactions
from protocol_model import vector as v
from protocol_model.machine import STEPS, Step

from ckptfmt.format import states
from ckptfmt.format.states import State

ROOT = Path(__file__).resolve().parents[2]


def _exists(link: str) -> bool:
    module, colon, name = link.partition(":")
    if not colon:
        page, _, words = link.partition("#")
        return words in " ".join((ROOT / page).read_text().split())
    found: object = importlib.import_module(module)
    for part in name.split("."):
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return callable(found)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_every_step_names_what_it_stands_for(step: Step) -> None:
    assert step.links
    assert [link for link in step.links if not _exists(link)] == []


def test_every_transaction_names_the_catalogs_own() -> None:
    assert [link for link in transactions.LINKS.values() if not _exists(link)] == []
    assert set(transactions.LINKS) <= set(dir(transactions))


def test_a_link_that_leads_nowhere_is_noticed() -> None:
    assert not _exists("ckptfmt.engine.protocol:no_such_function")
    assert not _exists("spec/commit-protocol.md#no such words on that page")


def test_the_model_takes_its_transitions_from_the_library() -> None:
    table = {(step.name, step.source, step.target) for step in states.TRANSITIONS}
    assert {(name, v.STATES[source], v.STATES[target]) for (name, source), target in v.MOVES.items()} == table
    assert {v.STATES[code] for code in v.OPEN} == states.OPEN_STATES
    assert set(v.CODES) == set(State)


def test_every_step_belongs_to_a_room_that_the_actors_import() -> None:
    rooms = {room.__name__ for room in actors.STEP_ROOMS} | {"protocol_model.machine"}
    assert {step.body.__module__ for step in STEPS} == rooms
