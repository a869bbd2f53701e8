"""Generations, and what hangs on them. Nothing here sorts by step, name or time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

from ckptfmt.catalog.clock import moment_or_none
from ckptfmt.catalog.snapshot import Row, Snapshot
from ckptfmt.errors import InvalidInput, NotFound
from ckptfmt.format.states import State
from ckptfmt.ports.records import GenerationRecord, RankRecord

_ELSEWHERE = {
    "run": "r.name",
    "run_key": "r.key",
    "launch_token": "l.token",
    "stall_seconds": "(SELECT MAX(q.stall_seconds) FROM ranks AS q WHERE q.generation_id = g.id)",
    "pinned": "p.generation_id IS NOT NULL",
}
"""Fields of the record that are no columns of ``generations``."""
_NAMES = tuple(field.name for field in fields(GenerationRecord) if field.name != "tags")

_ALL = f"""
SELECT {", ".join(_ELSEWHERE.get(name, f"g.{name}") for name in _NAMES)}
FROM generations AS g JOIN runs AS r ON r.id = g.run_id JOIN launches AS l ON l.id = g.launch_id
LEFT JOIN pins AS p ON p.generation_id = g.id
WHERE g.repository_id = :repository"""
_OF_RUN = " AND g.run_id = (SELECT id FROM runs WHERE repository_id = :repository AND name = :run)"
_COMMITTED = " AND g.state = 'committed'"
_NEWEST = " ORDER BY g.epoch DESC, g.commit_seq DESC LIMIT 1"
# The plain orders are served by an index; only a mixture has to be sorted.
_BY_COMMIT = " ORDER BY g.epoch DESC, g.commit_seq DESC, g.id DESC"
_BY_ID = " ORDER BY g.id DESC"
_MIXED = """
ORDER BY CASE WHEN g.state = 'committed' THEN 1 ELSE 0 END DESC, CASE WHEN g.state = 'committed' THEN g.epoch END DESC,
         CASE WHEN g.state = 'committed' THEN g.commit_seq END DESC, g.id DESC"""


def find(snapshot: Snapshot, repository_id: int, generation_id: int) -> GenerationRecord | None:
    """The generation with this id; None if the repository has none."""
    return _one(snapshot, f"{_ALL} AND g.id = :generation", repository=repository_id, generation=generation_id)


def by_id(snapshot: Snapshot, repository_id: int, generation_id: int) -> GenerationRecord:
    """The generation; ``NotFound`` if the repository has none with this id."""
    found = find(snapshot, repository_id, generation_id)
    if found is None:
        raise NotFound(f"there is no generation {generation_id} in this repository: list them with `ckptfmt ls`")
    return found


def run_id_of(snapshot: Snapshot, repository_id: int, generation_id: int) -> int | None:
    query = "SELECT run_id FROM generations WHERE repository_id = :repository AND id = :generation"
    found = snapshot.rows(query, repository=repository_id, generation=generation_id)
    return found[0][0] if found else None


def state_of(snapshot: Snapshot, repository_id: int, generation_id: int) -> State | None:
    query = "SELECT state FROM generations WHERE repository_id = :repository AND id = :generation"
    found = snapshot.rows(query, repository=repository_id, generation=generation_id)
    return State(found[0][0]) if found else None


def by_key(snapshot: Snapshot, repository_id: int, key: str) -> GenerationRecord | None:
    return _one(snapshot, f"{_ALL} AND g.key = :key", repository=repository_id, key=key)


def states(snapshot: Snapshot, repository_id: int) -> dict[str, tuple[State, int | None]]:
    """State and commit_seq of every generation, by key: all of a large repository in one plain query."""
    query = "SELECT key, state, commit_seq FROM generations WHERE repository_id = :repository"
    members = {state.value: state for state in State}
    return {key: (members[state], seq) for key, state, seq in snapshot.rows(query, repository=repository_id)}


def listing(
    snapshot: Snapshot, repository_id: int, *, run: str | None, states: Sequence[State] | None, limit: int | None
) -> list[GenerationRecord]:
    """Newest first (see the port): two queries, however many rows."""
    if limit is not None and limit < 0:
        raise InvalidInput(f"limit must not be negative: {limit}")
    wanted = set(State) if states is None else {State(state) for state in states}
    query = _ALL if run is None else _ALL + _OF_RUN
    if not wanted:
        query += " AND 1 = 0"
    elif wanted != set(State):
        query += f" AND g.state IN ({', '.join(repr(state.value) for state in sorted(wanted))})"
    if wanted == {State.COMMITTED}:
        query += _BY_COMMIT
    else:
        query += _MIXED if State.COMMITTED in wanted else _BY_ID
    if limit is not None:
        query += " LIMIT :limit"
    rows = snapshot.rows(query, repository=repository_id, run=run, limit=limit)
    return _records(rows, _tags(snapshot, repository_id, run))


def latest(snapshot: Snapshot, repository_id: int, run: str) -> GenerationRecord | None:
    """The newest committed generation of the run that a resume may take: not quarantined."""
    query = f"{_ALL}{_OF_RUN}{_COMMITTED} AND g.quarantined_at IS NULL{_NEWEST}"
    return _one(snapshot, query, repository=repository_id, run=run)


def committed_at_step(snapshot: Snapshot, repository_id: int, run: str, step: int) -> GenerationRecord | None:
    """The newest committed generation of that step."""
    query = f"{_ALL}{_OF_RUN}{_COMMITTED} AND g.step = :step{_NEWEST}"
    return _one(snapshot, query, repository=repository_id, run=run, step=step)


def last_committed_of(snapshot: Snapshot, repository_id: int, launch_id: int) -> GenerationRecord | None:
    """The newest generation of the launch that is committed now."""
    query = f"{_ALL} AND g.launch_id = :launch{_COMMITTED}{_NEWEST}"
    return _one(snapshot, query, repository=repository_id, launch=launch_id)


def unproven(snapshot: Snapshot, repository_id: int, run: str) -> list[GenerationRecord]:
    """Committed generations whose proof is pending, oldest commit first."""
    query = f"{_ALL}{_OF_RUN}{_COMMITTED} AND g.proven_at IS NULL ORDER BY g.epoch, g.commit_seq"
    rows = snapshot.rows(query, repository=repository_id, run=run)
    return _records(rows, _tags(snapshot, repository_id, run))


def unreplicated(snapshot: Snapshot, repository_id: int, run: str, tier: str) -> list[GenerationRecord]:
    """Committed generations that the tier does not hold whole, oldest commit first."""
    query = f"""{_ALL}{_OF_RUN}{_COMMITTED} AND g.quarantined_at IS NULL AND NOT EXISTS (
        SELECT 1 FROM replicated_generations AS w JOIN tiers AS t ON t.id = w.tier_id
        WHERE w.generation_id = g.id AND t.repository_id = g.repository_id AND t.uuid = :tier)
        ORDER BY g.epoch, g.commit_seq"""
    rows = snapshot.rows(query, repository=repository_id, run=run, tier=tier)
    return _records(rows, _tags(snapshot, repository_id, run))


def tagged(snapshot: Snapshot, repository_id: int, run: str, tag: str) -> GenerationRecord | None:
    """The generation that has the tag now."""
    query = f"""{_ALL} AND g.id = (
        SELECT t.generation_id FROM tags AS t JOIN runs AS o ON o.id = t.run_id
        WHERE o.repository_id = :repository AND o.name = :run AND t.name = :tag)"""
    return _one(snapshot, query, repository=repository_id, run=run, tag=tag)


def ranks_of(snapshot: Snapshot, repository_id: int, generation_id: int) -> list[RankRecord]:
    """The expected ranks of the generation, by rank."""
    found = snapshot.rows(_RANKS, repository=repository_id, generation=generation_id)
    return [RankRecord(**_moments(dict(zip(_OF_RANK, row, strict=True)))) for row in found]


_OF_RANK = tuple(field.name for field in fields(RankRecord))
_RANKS = f"""
SELECT {", ".join(f"q.{name}" for name in _OF_RANK)}
FROM ranks AS q JOIN generations AS g ON g.id = q.generation_id
WHERE g.repository_id = :repository AND q.generation_id = :generation ORDER BY q.rank
"""


def _tags(snapshot: Snapshot, repository_id: int, run: str | None) -> dict[int, tuple[str, ...]]:
    query = """
SELECT t.generation_id, t.name FROM tags AS t JOIN runs AS r ON r.id = t.run_id WHERE r.repository_id = :repository"""
    if run is not None:
        query += " AND r.name = :run"
    names: dict[int, tuple[str, ...]] = {}
    # Sorted here, for databases differ in how they sort text.
    for generation_id, name in sorted(snapshot.rows(query, repository=repository_id, run=run)):
        names[generation_id] = (*names.get(generation_id, ()), name)
    return names


def _one(snapshot: Snapshot, query: str, **values: Any) -> GenerationRecord | None:
    rows = snapshot.rows(query, **values)
    if not rows:
        return None
    (row,) = rows
    tags = snapshot.rows("SELECT name FROM tags WHERE generation_id = :generation", generation=row[_NAMES.index("id")])
    return _record(row, tuple(sorted(name for (name,) in tags)))


def _records(rows: Iterable[Row], tags: dict[int, tuple[str, ...]]) -> list[GenerationRecord]:
    id_at = _NAMES.index("id")
    return [_record(row, tags.get(row[id_at], ())) for row in rows]


def _record(row: Row, tags: tuple[str, ...]) -> GenerationRecord:
    values = _moments(dict(zip(_NAMES, row, strict=True)))
    values["state"] = State(values["state"])
    values["pinned"] = bool(values["pinned"])
    values["tiers"] = tuple(values["tiers"].split(",")) if values["tiers"] else ()
    return GenerationRecord(tags=tags, **values)


def _moments(values: dict[str, Any]) -> dict[str, Any]:
    """Times as aware datetimes."""
    for name in values:
        if name == "deadline" or name.endswith("_at"):
            values[name] = moment_or_none(values[name])
    return values
