"""Plans: every byte in one unit, every chunk once, and no unit in the place of one that may still be needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stages_fixtures import UNIT, WINDOW, make_small

from ckptfmt.engine.plan import SavePlan, check_host_bytes_max, make_plan
from ckptfmt.engine.units import Unit, align_up, joined
from ckptfmt.errors import InvalidInput
from ckptfmt.format import checksum
from ckptfmt.ports.arrays import LeafSpec


@pytest.fixture(autouse=True, scope="module")
def _small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch)
        yield


def planned(sizes: list[int], sync: set[int], host_bytes_max: int | None, name: str = "t") -> SavePlan:
    leaves = [(f"{name}{i}", LeafSpec("uint8", (n,), (0,), (n,), n)) for i, n in enumerate(sizes)]
    return make_plan(leaves, sync=sync, host_bytes_max=host_bytes_max)


SIZES = st.lists(st.one_of(st.integers(0, 100), st.integers(0, 10 * UNIT), st.just(4096), st.just(UNIT)), max_size=30)
LIMITS = st.one_of(st.none(), st.integers(WINDOW, 4 * WINDOW))


@given(SIZES, st.sets(st.integers(0, 30)), LIMITS)
def test_units_cover_the_packs_and_never_meet_in_one_place(
    sizes: list[int], sync: set[int], host_bytes_max: int | None
) -> None:
    plan = planned(sizes, sync, host_bytes_max)
    chunks = sorted(
        (chunk.leaf, chunk.number, chunk.nbytes) for p in plan.packs for unit in p.units for chunk in unit.chunks
    )
    assert chunks == [
        (leaf, number, nbytes)
        for leaf, size in enumerate(sizes)
        for number, (_, nbytes) in enumerate(checksum.chunk_spans(size, UNIT))
    ]
    for number, pack in enumerate(plan.packs):
        position = copied = 0
        for unit in pack.units:
            assert unit.pack == number
            assert unit.start == position
            assert unit.start < unit.stop <= unit.end <= pack.nbytes
            assert unit.nbytes < 2 * UNIT + 4096
            # Whoever writes a unit waits for all that has bytes in it.
            assert unit.leaves >= {
                leaf
                for leaf, at in zip(pack.leaves, pack.offsets, strict=True)
                if at < unit.end and at + sizes[leaf] > unit.start and sizes[leaf]
            }
            if pack.arena_offset is not None:
                assert unit.stop == min(unit.start + UNIT, pack.nbytes)
                assert [chunk for chunk in unit.chunks if not unit.start <= chunk.offset < unit.stop] == []
                position = unit.stop
                continue
            # What a unit copies (header, chunks) begins where the one before it ended, so every byte comes once.
            first = [max(unit.start, copied)] if unit.start < len(pack.header) else []
            starts = first + [chunk.offset for chunk in unit.chunks]
            assert starts[0] == max(unit.start, copied) if starts else unit.end == copied
            position, copied = unit.stop, unit.end
        assert position == pack.nbytes
        if pack.arena_offset is not None:
            assert all(unit.place == pack.arena_offset + unit.start and unit.turn is None for unit in pack.units)
            check_joined(pack.units)
    check_places(plan)
    if host_bytes_max is not None:
        assert plan.arena_bytes <= host_bytes_max


def check_joined(units: Sequence[Unit]) -> None:
    """Put together, units are the same bytes, chunks and leaves, in pieces as large as they may be."""
    assert joined(units, 0) == joined(units, UNIT) == [*units]
    groups = joined(units, 3 * UNIT)
    assert [group.start for group in groups] == [unit.start for unit in units[::3]]
    assert [group.stop for group in groups] == [unit.start for unit in units[3::3]] + [units[-1].stop]
    assert [chunk for group in groups for chunk in group.chunks] == [chunk for unit in units for chunk in unit.chunks]
    for number, group in enumerate(groups):
        members = units[3 * number : 3 * number + 3]
        assert group.place == members[0].place
        assert group.end == max(unit.end for unit in members)
        assert group.leaves == frozenset().union(*(unit.leaves for unit in members))


def check_places(plan: SavePlan) -> None:
    """Play the turns: when a unit is copied only those after its ``after`` may still be held."""
    held = [(p.arena_offset, p.arena_offset + align_up(p.nbytes)) for p in plan.packs if p.arena_offset is not None]
    assert [unit.turn for unit in plan.passing] == list(range(len(plan.passing)))
    for turn, unit in enumerate(plan.passing):
        assert unit.after <= turn
        assert unit.place % 4096 == unit.start % 4096 == 0
        place = (unit.place, unit.place + unit.nbytes)
        assert place[1] <= plan.arena_bytes
        others = [(o.place, o.place + o.nbytes) for o in plan.passing[unit.after : turn]]
        assert not [other for other in held + others if other[0] < place[1] and place[0] < other[1]]
    after = [unit.after for unit in plan.passing]
    assert after == sorted(after)


def test_the_synchronous_part_has_packs_of_its_own_which_come_first() -> None:
    plan = planned([5 * UNIT, 10, 3 * UNIT, 20], {1, 2}, None)
    assert [set(pack.leaves) for pack in plan.packs] == [{1, 2}, {0, 3}]
    assert [pack.arena_offset is None for pack in plan.packs] == [True, False]
    assert plan.sync_turns == len(plan.packs[0].units) == len(plan.passing)
    assert plan.arena_bytes <= align_up(plan.packs[1].nbytes) + WINDOW
    assert set(plan.held.leaves) == {0, 3}
    everything = planned([5 * UNIT, 10], {0, 1}, None)
    assert len(everything.packs) == 1
    assert everything.arena_bytes <= WINDOW


def test_a_state_that_fits_is_held_whole_whatever_the_limit() -> None:
    unlimited, limited = planned([UNIT] * 5, set(), None), planned([UNIT] * 5, set(), WINDOW)
    assert limited == unlimited
    assert not limited.passing
    staged = planned([UNIT] * 8, set(), WINDOW)
    assert len(staged.passing) == len(staged.packs[0].units)
    assert staged.sync_turns == 0
    assert not staged.held.leaves


def test_a_small_window_is_used_to_its_end_before_anything_has_to_leave() -> None:
    plan = planned([40 * UNIT], set(), WINDOW)
    free = [unit for unit in plan.passing if unit.after == 0]
    assert sum(align_up(unit.nbytes) for unit in free) >= WINDOW - 2 * UNIT
    # From then on one unit makes room for one.
    lags = {turn - unit.after for turn, unit in enumerate(plan.passing) if unit.after}
    assert lags <= set(range(len(free) - 2, len(free) + 1))


@pytest.mark.parametrize("host_bytes_max", [None, WINDOW])
def test_a_long_header_is_cut_too(host_bytes_max: int | None) -> None:
    plan = planned([1] * 1200 + [4 * WINDOW], set(), host_bytes_max, name="x" * 200)
    pack = plan.packs[0]
    assert bool(plan.passing) == (host_bytes_max is not None)
    assert len(pack.header) > 2 * UNIT
    assert [unit.chunks for unit in pack.units[:2]] == [(), ()]
    assert max(unit.nbytes for unit in pack.units) < 2 * UNIT + 4096


@pytest.mark.parametrize("value", [0, -1, WINDOW - 1, True, 1e9, "8G"])
def test_a_limit_in_which_nothing_moves_is_refused(value: object) -> None:
    with pytest.raises(InvalidInput, match="host_bytes_max="):
        check_host_bytes_max(value)  # type: ignore[arg-type]


def test_two_snapshots_share_a_limit() -> None:
    check_host_bytes_max(None, arenas=2)
    check_host_bytes_max(2 * WINDOW, arenas=2)
    with pytest.raises(InvalidInput, match=f"at least {2 * WINDOW} bytes .* 2 saves in flight"):
        check_host_bytes_max(2 * WINDOW - 1, arenas=2)
