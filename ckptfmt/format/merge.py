"""From the parts of all ranks to one manifest (step C3 of a commit). See spec/format-v1.md, "Merging parts"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ckptfmt.errors import FormatError, InvalidInput, Mismatch
from ckptfmt.format import tree
from ckptfmt.format.manifest import Manifest, RankRow, Sound, validate
from ckptfmt.format.part import Part
from ckptfmt.format.tables import BoxTable, Extent, PackRow, TensorTable
from ckptfmt.format.trees import Trees

_TensorKey = tuple[str, int]  # name, rank or -1
_BoxKey = tuple[_TensorKey, Extent, Extent]


class _Stored(NamedTuple):
    """A box as some rank wrote it; ``pack`` counts over all parts."""

    writer: int
    start: Extent
    size: Extent
    pack: int
    offset: int
    digests: str


def merge_parts(parts: Sequence[Part], *, id: int, repository: str, run: str, parent: str | None) -> Sound:
    """Return the manifest of the generation that ``parts`` make up, validated as a whole and ready to be encoded.

    Needs exactly one part of each rank, of one save. Boxes that several ranks hold must have equal
    digests on all of them. ``FormatError`` if parts are missing or don't belong together or leave a
    tensor untiled; ``Mismatch``, listing every tensor, path and pair of ranks, where ranks disagree
    about the state itself. Metadata, time and writer are those of rank 0.
    """
    ordered = _check_set(parts)
    problems: list[str] = []
    if _is_all(ordered):
        packs, tensors, boxes = ordered[0].packs, ordered[0].tensors, ordered[0].boxes
    else:
        rows = _unite_rows(ordered, problems)
        packs, stored = _unite_boxes(ordered, problems)
        _check_claims(ordered, stored, problems)
        tensors, boxes = _tables(rows, stored)
    aliases = _unite_aliases(ordered, problems)
    if problems:
        raise Mismatch(f"the ranks' parts of generation {ordered[0].key} disagree", tuple(problems))
    first = ordered[0]
    manifest = Manifest(
        read_features=sorted({word for part in ordered for word in part.read_features}),
        write_features=sorted({word for part in ordered for word in part.write_features}),
        key=first.key,
        step=first.step,
        launch=first.launch,
        save_number=first.save_number,
        created_at=first.created_at,
        writer=first.writer,
        digest_algorithm=first.digest_algorithm,
        chunk_bytes=first.chunk_bytes,
        packs=packs,
        tensors=tensors,
        boxes=boxes,
        aliases=aliases,
        metadata=first.metadata,
        repository=repository,
        run=run,
        id=id,
        parent=parent,
        ranks=[RankRow(rank=part.rank, mesh=part.mesh) for part in ordered],
        trees=Trees(
            common=tree.unite({part.rank: part.tree for part in ordered}),
            per_rank={str(part.rank): part.per_rank for part in ordered if part.per_rank},
        ),
    )
    return validate(manifest)


def _is_all(parts: Sequence[Part]) -> bool:
    """Whether one rank wrote everything, one box for each tensor: its tables are the manifest's."""
    first = parts[0]
    rows = range(len(first.tensors.name))
    return len(parts) == 1 and not first.claims.tensor and first.boxes.tensor == list(rows)


def _check_set(parts: Sequence[Part]) -> list[Part]:
    if not parts:
        raise InvalidInput("no parts to merge")
    ordered = sorted(parts, key=lambda part: part.rank)
    first = ordered[0]
    ranks = [part.rank for part in ordered]
    if ranks != list(range(first.world_size)):
        raise FormatError(
            f"generation {first.key} needs one part of each of {first.world_size} ranks, got those of {ranks}"
        )
    for name in ("key", "step", "launch", "save_number", "world_size", "digest_algorithm", "chunk_bytes"):
        for part in ordered[1:]:
            mine, its = getattr(first, name), getattr(part, name)
            if mine != its:
                raise FormatError(
                    f"generation {first.key}: {name} is {mine!r} on rank 0, but {its!r} on rank {part.rank}"
                )
    return ordered


def _key(part: Part, i: int) -> _TensorKey:
    return part.tensors.name[i], part.tensors.rank[i]


def _unite_rows(parts: Sequence[Part], problems: list[str]) -> dict[_TensorKey, tuple[int, str, str, Extent]]:
    """Return the tensors in order of appearance as (first rank, kind, dtype, shape)."""
    rows: dict[_TensorKey, tuple[int, str, str, Extent]] = {}
    for part in parts:
        table = part.tensors
        if part is not parts[0] and table == parts[0].tensors:
            continue  # every rank holds a share of each tensor
        for i, row in enumerate(zip(table.kind, table.dtype, table.shape, strict=True)):
            seen = rows.setdefault(_key(part, i), (part.rank, *row))
            if seen[1:] != row:
                texts = [f"{kind} {dtype} {list(shape)}" for kind, dtype, shape in (seen[1:], row)]
                problems.append(
                    f"tensor {table.name[i]!r} is {texts[0]} on rank {seen[0]}, but {texts[1]} on rank {part.rank}"
                )
    return rows


def _unite_boxes(parts: Sequence[Part], problems: list[str]) -> tuple[list[PackRow], dict[_BoxKey, _Stored]]:
    """Return all packs, and each distinct box as the lowest rank wrote it."""
    packs: list[PackRow] = []
    index: dict[tuple[str | None, str], int] = {}
    stored: dict[_BoxKey, _Stored] = {}
    for part in parts:
        at = []
        for pack in part.packs:
            i = index.setdefault((pack.generation, pack.name), len(packs))
            if i == len(packs):
                packs.append(pack)
            elif packs[i] != pack:
                problems.append(f"pack {pack.name} is described differently by rank {part.rank} and a lower one")
            at.append(i)
        table = part.boxes
        columns = (table.tensor, table.start, table.size, table.pack, table.offset, table.digests)
        for i, start, size, pack_at, offset, digests in zip(*columns, strict=True):
            new = _Stored(part.rank, start, size, at[pack_at], offset, digests)
            seen = stored.setdefault((_key(part, i), start, size), new)
            _compare(part, i, seen, new, problems)
    return packs, stored


def _compare(part: Part, i: int, seen: _Stored, new: _Stored, problems: list[str]) -> None:
    if seen.digests != new.digests:
        problems.append(
            f"tensor {part.tensors.name[i]!r}, box {list(new.start)}+{list(new.size)}: the replicas of ranks "
            f"{seen.writer} and {part.rank} differ; if each rank keeps its own, mark it PerRank"
        )


def _check_claims(parts: Sequence[Part], stored: dict[_BoxKey, _Stored], problems: list[str]) -> None:
    for part in parts:
        table = part.claims
        columns = (table.tensor, table.start, table.size, table.digests)
        for i, start, size, digests in zip(*columns, strict=True):
            seen = stored.get((_key(part, i), start, size))
            if seen is None:
                problems.append(
                    f"tensor {part.tensors.name[i]!r}, box {list(start)}+{list(size)}: rank {part.rank} holds a "
                    "replica that no rank wrote"
                )
            else:
                _compare(part, i, seen, _Stored(part.rank, start, size, -1, 0, digests), problems)


def _unite_aliases(parts: Sequence[Part], problems: list[str]) -> dict[str, str]:
    aliases: dict[str, str] = {}
    for part in parts:
        for other, name in part.aliases.items():
            if aliases.setdefault(other, name) != name:
                problems.append(f"{other!r} is tied to {aliases[other]!r} on one rank, to {name!r} on rank {part.rank}")
    return aliases


def _tables(
    rows: dict[_TensorKey, tuple[int, str, str, Extent]], stored: dict[_BoxKey, _Stored]
) -> tuple[TensorTable, BoxTable]:
    tensors, boxes = TensorTable(), BoxTable()
    position = {}
    for (name, rank), (_, kind, dtype, shape) in rows.items():
        position[name, rank] = len(tensors.name)
        tensors.name.append(name)
        tensors.kind.append(kind)  # type: ignore[arg-type]
        tensors.rank.append(rank)
        tensors.dtype.append(dtype)
        tensors.shape.append(shape)
    for key, box in sorted(stored.items(), key=lambda item: (position[item[0][0]], item[1].start)):
        boxes.tensor.append(position[key[0]])
        boxes.start.append(box.start)
        boxes.size.append(box.size)
        boxes.pack.append(box.pack)
        boxes.offset.append(box.offset)
        boxes.digests.append(box.digests)
    return tensors, boxes
