"""Who writes what several ranks hold: one of them, evenly, and all decide alike without asking."""

from __future__ import annotations

import random
from collections import Counter
from math import prod

from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfmt.engine.save.context import Ranks
from ckptfmt.engine.save.owners import roles_of, stored_kinds
from ckptfmt.ports.arrays import LeafKind, LeafSpec

Leaf = tuple[str, LeafSpec]


def leaf(
    name: str, count: int, holders: tuple[int, ...] = (), kind: LeafKind = "replicated", start: int = 0, whole: int = 0
) -> Leaf:
    return name, LeafSpec("uint8", (whole or count,), (start,), (count,), count, kind, holders=holders)


def all_of(world: int, rank: int = 0) -> Ranks:
    return Ranks(rank, world, tuple(range(world)))


def test_plain_tensors_are_dealt_out_by_size() -> None:
    leaves = [leaf("a", 10), leaf("b", 40), leaf("c", 30), leaf("d", 20), leaf("e", 30)]
    writers = {name: [] for name, _ in leaves}
    for rank in range(3):
        roles = roles_of(leaves, all_of(3, rank))
        for index, (name, _) in enumerate(leaves):
            if index not in roles.claims:
                writers[name].append(rank)
    assert writers == {"b": [0], "c": [1], "e": [2], "d": [1], "a": [2]}


def test_one_rank_writes_all() -> None:
    leaves = [leaf("a", 10), leaf("b", 40, (0, 1))]
    assert not roles_of(leaves, Ranks()).claims
    assert not roles_of(leaves, Ranks(2, 4, (2,))).claims


def test_own_boxes_are_nobody_elses() -> None:
    leaves = [
        leaf("a", 4, kind="sharded", whole=8),
        leaf("r", 8, kind="per_rank"),
        leaf("s", 4, (1,), "sharded", whole=8),
    ]
    assert not roles_of(leaves, all_of(4, 1)).claims


def test_who_holds_nothing_has_no_box() -> None:
    leaves = [leaf("w", 0, (3,), "sharded", whole=8), leaf("empty", 0)]
    roles = roles_of(leaves, all_of(4, 3))
    assert roles.bare == {0}
    assert roles.claims == {1}


def test_ranks_that_do_not_save_own_nothing() -> None:
    ranks = Ranks(4, 8, (4, 5, 6, 7))
    leaves = [leaf("w", 8, (0, 4), "sharded", whole=16), leaf("b", 4)]
    assert roles_of(leaves, ranks).claims == frozenset()
    assert roles_of(leaves, Ranks(5, 8, (4, 5, 6, 7))).claims == {1}


def test_only_what_every_rank_has_is_called_replicated() -> None:
    specs = [
        leaf("a", 4)[1],
        leaf("b", 4, (0, 1, 2, 3))[1],
        leaf("c", 4, (0, 1))[1],
        leaf("d", 4, (0, 1), "sharded")[1],
    ]
    assert stored_kinds(specs, all_of(4)) == ["replicated", "replicated", "sharded", "sharded"]
    assert stored_kinds(specs, Ranks(0, 4, (0, 1))) == ["replicated", "replicated", "replicated", "sharded"]
    assert stored_kinds([leaf("r", 4, kind="per_rank")[1]], all_of(4)) == ["per_rank"]


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 8), st.data())
def test_every_box_has_one_writer_and_each_set_of_holders_is_balanced(world: int, data: st.DataObject) -> None:
    sets = data.draw(st.lists(st.sets(st.integers(0, world - 1), min_size=1), min_size=1, max_size=4))
    shared = [
        leaf(f"t{number}", data.draw(st.integers(1, 50)), tuple(sorted(data.draw(st.sampled_from(sets)))), "sharded")
        for number in range(data.draw(st.integers(1, 20)))
    ]
    shared += [leaf(f"p{number}", data.draw(st.integers(1, 50))) for number in range(data.draw(st.integers(0, 5)))]
    every = tuple(range(world))
    writers: Counter[str] = Counter()
    loads: dict[tuple[int, ...], Counter[int]] = {}
    for rank in every:
        mine = [each for each in shared if rank in (each[1].holders or every)]
        random.Random(rank).shuffle(mine)
        roles = roles_of(mine, all_of(world, rank))
        for index, (name, spec) in enumerate(mine):
            if index not in roles.claims:
                writers[name] += 1
                loads.setdefault(spec.holders or every, Counter())[rank] += spec.nbytes
    assert writers == Counter({name: 1 for name, _ in shared})
    for holders, load in loads.items():
        largest = max(prod(spec.size) for _, spec in shared if (spec.holders or every) == holders)
        assert max(load[rank] for rank in holders) - min(load[rank] for rank in holders) <= largest
