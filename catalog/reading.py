"""Queries over generations. Nothing here writes, and nothing sorts by step, name or time."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from functools import cache
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, case, func, select, text

from ckptfmt.catalog.clock import database_now, from_text
from ckptfmt.catalog.schema import catalog_meta, generations, launches, pins, ranks, runs, tags
from ckptfmt.catalog.views import VIEWS
from ckptfmt.errors import InvalidInput, NotFound
from ckptfmt.format.states import State
from ckptfmt.ports.catalog import CatalogIdentity, GenerationRecord, RankRecord

_COMMITTED = generations.c.state == State.COMMITTED
_COMMIT_ORDER = (generations.c.epoch.desc(), generations.c.commit_seq.desc())
NOT_QUARANTINED = generations.c.quarantined_at.is_(None)
"""What a resume may take."""


def one(connection: Connection, repository_id: int, *where: ColumnElement[bool]) -> GenerationRecord | None:
    """The one generation that ``where`` selects."""
    row = connection.execute(_query(repository_id).where(*where)).one_or_none()
    return _single(connection, row)


def by_id(connection: Connection, repository_id: int, generation_id: int) -> GenerationRecord:
    """The generation; ``NotFound`` if the repository has none with this id."""
    found = one(connection, repository_id, generations.c.id == generation_id)
    if found is None:
        raise NotFound(f"there is no generation {generation_id} in this repository: list them with `ckptfmt ls`")
    return found


def listing(
    connection: Connection, repository_id: int, *, run: str | None, states: Sequence[State] | None, limit: int | None
) -> list[GenerationRecord]:
    """Newest first (see the port): two queries, however many rows."""
    if limit is not None and limit < 0:
        raise InvalidInput(f"limit must not be negative: {limit}")
    query = _query(repository_id)
    if run is not None:
        query = query.where(generations.c.run_id == _run_id(repository_id, run))
    wanted = set(State) if states is None else {State(state) for state in states}
    if wanted != set(State):
        query = query.where(generations.c.state.in_(sorted(wanted)))
    # The plain orders are served by an index; only a mixture has to be sorted.
    if wanted == {State.COMMITTED}:
        query = query.order_by(*_COMMIT_ORDER, generations.c.id.desc())
    elif State.COMMITTED not in wanted:
        query = query.order_by(generations.c.id.desc())
    else:
        query = query.order_by(
            case((_COMMITTED, 1), else_=0).desc(),
            case((_COMMITTED, generations.c.epoch)).desc(),
            case((_COMMITTED, generations.c.commit_seq)).desc(),
            generations.c.id.desc(),
        )
    rows = connection.execute(query.limit(limit)).all()
    names = _tags(connection, repository_id, run)
    return [_record(row, names.get(row.id, ())) for row in rows]


def latest(
    connection: Connection, repository_id: int, run: str, *where: ColumnElement[bool]
) -> GenerationRecord | None:
    """The newest committed generation of the run that ``where`` leaves."""
    row = connection.execute(
        _query(repository_id)
        .where(generations.c.run_id == _run_id(repository_id, run), _COMMITTED, *where)
        .order_by(*_COMMIT_ORDER)
        .limit(1)
    ).one_or_none()
    return _single(connection, row)


def last_committed_of(connection: Connection, repository_id: int, launch_id: int) -> GenerationRecord | None:
    """The newest generation of the launch that is committed now."""
    row = connection.execute(
        _query(repository_id).where(generations.c.launch_id == launch_id, _COMMITTED).order_by(*_COMMIT_ORDER).limit(1)
    ).one_or_none()
    return _single(connection, row)


def unproven(connection: Connection, repository_id: int, run: str) -> list[GenerationRecord]:
    """Committed generations whose proof is pending, oldest commit first."""
    rows = connection.execute(
        _query(repository_id)
        .where(generations.c.run_id == _run_id(repository_id, run), _COMMITTED, generations.c.proven_at.is_(None))
        .order_by(generations.c.epoch, generations.c.commit_seq)
    ).all()
    names = _tags(connection, repository_id, run)
    return [_record(row, names.get(row.id, ())) for row in rows]


def tagged(connection: Connection, repository_id: int, run: str, tag: str) -> GenerationRecord | None:
    """The generation that has the tag now."""
    row = connection.execute(
        _query(repository_id)
        .join(tags, tags.c.generation_id == generations.c.id)
        .where(tags.c.run_id == _run_id(repository_id, run), tags.c.name == tag)
    ).one_or_none()
    return _single(connection, row)


def tagged_id(connection: Connection, run_id: int, tag: str) -> Row[Any, Any, Any] | None:
    """Id, epoch and commit_seq of the generation that has the tag."""
    return connection.execute(
        select(generations.c.id, generations.c.epoch, generations.c.commit_seq)
        .join(tags, tags.c.generation_id == generations.c.id)
        .where(tags.c.run_id == run_id, tags.c.name == tag)
    ).one_or_none()


def ranks_of(connection: Connection, repository_id: int, generation_id: int) -> list[RankRecord]:
    """The expected ranks of the generation, by rank."""
    query = (
        select(ranks)
        .join(generations, generations.c.id == ranks.c.generation_id)
        .where(generations.c.repository_id == repository_id, ranks.c.generation_id == generation_id)
        .order_by(ranks.c.rank)
    )
    return [RankRecord(**row._mapping) for row in connection.execute(query)]


def identity(connection: Connection) -> CatalogIdentity:
    row = connection.execute(select(catalog_meta.c.uuid, catalog_meta.c.epoch)).one()
    return CatalogIdentity(uuid=row.uuid, epoch=row.epoch)


def now(connection: Connection) -> datetime:
    return connection.execute(select(database_now())).scalar_one()


def view(connection: Connection, repository: str, name: str, run: str | None) -> list[dict[str, Any]]:
    """Rows of a documented view for one repository; times as aware datetimes."""
    found = VIEWS.get(name)
    if found is None:
        raise InvalidInput(f"the catalog has no view {name!r}: use one of {', '.join(VIEWS)}")
    columns = ", ".join(f'"{column.name}"' for column in found.columns)
    query = f"SELECT {columns} FROM {found.name} WHERE repository = :repository"
    if run is not None:
        query += " AND run = :run"
    result = connection.execute(text(f"{query} ORDER BY {found.order}"), {"repository": repository, "run": run})
    times = {column.name for column in found.columns if column.kind == "time"}
    return [
        {key: from_text(value) if key in times and isinstance(value, str) else value for key, value in row.items()}
        for row in result.mappings()
    ]


def _run_id(repository_id: int, run: str) -> Any:
    return select(runs.c.id).where(runs.c.repository_id == repository_id, runs.c.name == run).scalar_subquery()


@cache
def _query(repository_id: int) -> Any:
    # Selects are immutable: building this one costs more than running it.
    stall = select(func.max(ranks.c.stall_seconds)).where(ranks.c.generation_id == generations.c.id).scalar_subquery()
    return (
        select(
            generations,
            runs.c.name.label("run"),
            runs.c.key.label("run_key"),
            launches.c.token.label("launch_token"),
            pins.c.generation_id.is_not(None).label("pinned"),
            stall.label("stall_seconds"),
        )
        .join(runs, runs.c.id == generations.c.run_id)
        .join(launches, launches.c.id == generations.c.launch_id)
        .outerjoin(pins, pins.c.generation_id == generations.c.id)
        .where(generations.c.repository_id == repository_id)
    )


def _tags(connection: Connection, repository_id: int, run: str | None) -> dict[int, tuple[str, ...]]:
    query = (
        select(tags.c.generation_id, tags.c.name)
        .join(runs, runs.c.id == tags.c.run_id)
        .where(runs.c.repository_id == repository_id)
        .order_by(tags.c.name)
    )
    if run is not None:
        query = query.where(runs.c.name == run)
    names: dict[int, tuple[str, ...]] = {}
    for row in connection.execute(query):
        names[row.generation_id] = (*names.get(row.generation_id, ()), row.name)
    return names


def _single(connection: Connection, row: Row[Any] | None) -> GenerationRecord | None:
    if row is None:
        return None
    names = connection.execute(select(tags.c.name).where(tags.c.generation_id == row.id).order_by(tags.c.name))
    return _record(row, tuple(names.scalars()))


def _record(row: Row[Any], tag_names: tuple[str, ...]) -> GenerationRecord:
    return GenerationRecord(
        id=row.id,
        run=row.run,
        run_key=row.run_key,
        key=row.key,
        step=row.step,
        state=State(row.state),
        launch_id=row.launch_id,
        launch_token=row.launch_token,
        fence=row.fence,
        save_number=row.save_number,
        world_size=row.world_size,
        parent_key=row.parent_key,
        commit_seq=row.commit_seq,
        epoch=row.epoch,
        manifest_name=row.manifest_name,
        manifest_digest=row.manifest_digest,
        manifest_bytes=row.manifest_bytes,
        nbytes=row.nbytes,
        stall_seconds=row.stall_seconds,
        tags=tag_names,
        pinned=bool(row.pinned),
        created_at=row.created_at,
        deadline=row.deadline,
        durable_at=row.durable_at,
        committed_at=row.committed_at,
        commit_fence=row.commit_fence,
        proven_at=row.proven_at,
        abort_stage=row.abort_stage,
        abort_rank=row.abort_rank,
        abort_reason=row.abort_reason,
        quarantined_at=row.quarantined_at,
        quarantine_reason=row.quarantine_reason,
        retired_at=row.retired_at,
        swept_at=row.swept_at,
    )
