"""From the parts of all ranks to one manifest (step C3 of a commit). See spec/format-v1.md, "Merging parts"."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from operator import ne
from typing import Final

import msgspec

from ckptfmt.errors import FormatError, InvalidInput, Mismatch
from ckptfmt.format import tree
from ckptfmt.format.manifest import Manifest, RankRow, Sound, validate
from ckptfmt.format.merge_boxes import BoxUnion
from ckptfmt.format.merge_rows import TensorUnion
from ckptfmt.format.naming import NAMED_MAX, ranks_shown, shown
from ckptfmt.format.part import Part
from ckptfmt.format.tables import BoxTable, PackRow, TensorTable
from ckptfmt.format.trees import Trees


def merge_parts(
    parts: Sequence[Part],
    *,
    id: int,
    repository: str,
    run: str,
    parent: str | None,
    members: Sequence[int] | None = None,
    world_size: int | None = None,
) -> Sound:
    """Return the manifest of the generation that ``parts`` make up, validated as a whole and ready to be encoded.

    Needs exactly one part of each of ``members``, the ranks that save (None: all of the world), of one save of a launch
    of ``world_size`` ranks (None: as many as save). Boxes that several ranks hold must have equal digests on all of
    them. ``FormatError`` if parts are missing or don't belong together or leave a tensor untiled; ``Mismatch``, listing
    every tensor, path and pair of ranks, where ranks disagree about the state itself. Metadata, time and writer are
    those of the lowest rank. No part is changed, but their columns may become the manifest's.
    """
    ordered = _check_set(parts, members, world_size)
    first = ordered[0]
    problems: list[str] = []
    if _is_all(ordered):
        packs, tensors, boxes, aliases = first.packs, first.tensors, first.boxes, first.aliases
    else:
        packs, tensors, boxes, aliases = _unite(ordered, problems)
    _check_slots(ordered, problems)
    if problems:
        raise Mismatch(f"the ranks' parts of generation {first.key} disagree", tuple(problems))
    mesh_of = {part.rank: part.mesh for part in ordered}
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
        ranks=[RankRow(rank=rank, mesh=mesh_of.get(rank)) for rank in range(first.world_size)],
        trees=Trees(
            common=tree.unite({part.rank: part.tree for part in ordered}),
            per_rank={str(part.rank): part.per_rank for part in ordered if part.per_rank},
        ),
        tiers=_tiers_of(ordered),
    )
    return validate(manifest)


def _tiers_of(parts: Sequence[Part]) -> list[str] | msgspec.UnsetType:
    """The tiers that hold the packs of every rank."""
    if any(part.tiers is msgspec.UNSET for part in parts):
        return msgspec.UNSET
    common = set.intersection(*(set(part.tiers or ()) for part in parts))
    return sorted(common) or msgspec.UNSET


def _check_slots(parts: Sequence[Part], problems: list[str]) -> None:
    """What a rank keeps for itself every rank has to keep: a resume would find out too late."""
    for slot in dict.fromkeys(slot for part in parts for slot in part.per_rank):
        lacking = [part.rank for part in parts if slot not in part.per_rank]
        if lacking:
            problems.append(
                f"{slot!r} is kept by each rank for itself (PerRank, Rng), but not by {ranks_shown(lacking)}"
            )


def _unite(parts: Sequence[Part], problems: list[str]) -> tuple[list[PackRow], TensorTable, BoxTable, dict[str, str]]:
    aliases = _unite_aliases(parts, problems)
    tensors = TensorUnion(parts, problems)
    tensors.check_owners(problems)
    boxes = BoxUnion(parts, tensors, problems)
    dropped = boxes.check_aliases(aliases, problems)
    if problems:
        return boxes.packs, TensorTable(), BoxTable(), aliases
    tensors.check_replicated(dropped, problems)
    return boxes.packs, tensors.table(dropped), boxes.table(dropped), aliases


def _is_all(parts: Sequence[Part]) -> bool:
    """Whether one rank wrote everything, one box for each tensor: its tables are the manifest's."""
    first = parts[0]
    rows = range(len(first.tensors.name))
    return len(parts) == 1 and not first.claims.tensor and first.boxes.tensor == list(rows)


def _check_set(parts: Sequence[Part], members: Sequence[int] | None, world_size: int | None) -> list[Part]:
    if not parts:
        raise InvalidInput("no parts to merge")
    ordered = sorted(parts, key=lambda part: part.rank)
    first = ordered[0]
    ranks = [part.rank for part in ordered]
    if world_size is None:
        world_size = first.world_size if members is None else len(members)
    expected = range(world_size) if members is None else sorted(members)  # a range, for a part may claim any size
    if len(ranks) != len(expected) or any(map(ne, ranks, expected)):
        raise FormatError(f"generation {first.key} needs one part of each of {_which(expected, ranks)}")
    if first.world_size != world_size:
        raise FormatError(
            f"generation {first.key}: world_size is {first.world_size} on rank {first.rank}, but its launch has "
            f"{world_size} ranks"
        )
    for name in _EQUAL:
        for part in ordered[1:]:
            mine, its = getattr(first, name), getattr(part, name)
            if mine != its:
                raise FormatError(
                    f"generation {first.key}: {name} is {mine!r} on rank {first.rank}, but {its!r} on rank {part.rank}"
                )
    for part in ordered[1:]:
        if part.replica_check != first.replica_check:
            words = ["not compared" if each.replica_check == "off" else "compared" for each in (first, part)]
            raise FormatError(
                f"generation {first.key}: replicas are {words[0]} on rank {first.rank}, but {words[1]} on rank "
                f"{part.rank}; give all ranks the same replica_check"
            )
    return ordered


_EQUAL: Final = ("key", "step", "launch", "save_number", "world_size", "digest_algorithm", "chunk_bytes")


def _which(expected: Sequence[int], ranks: Sequence[int]) -> str:
    wanted = expected if isinstance(expected, range) else frozenset(expected)
    there = frozenset(rank for rank in ranks if rank in wanted)
    others = [rank for rank, before in zip(ranks, [None, *ranks], strict=False) if rank not in wanted or rank == before]
    missing = list(islice((rank for rank in expected if rank not in there), NAMED_MAX))
    counts = ((missing, len(expected) - len(there), "missing"), (others, len(others), "unexpected"))
    found = [f"{count} {word} ({shown(what, count)})" for what, count, word in counts if count]
    return f"{len(expected)} ranks: {', '.join(found)}"


def _unite_aliases(parts: Sequence[Part], problems: list[str]) -> dict[str, str]:
    aliases: dict[str, str] = {}
    tied_by: dict[str, int] = {}
    for part in parts:
        if part.aliases is parts[0].aliases and part is not parts[0]:
            continue
        for other, name in part.aliases.items():
            rank = tied_by.setdefault(other, part.rank)
            if aliases.setdefault(other, name) != name:
                problems.append(
                    f"{other!r} is tied to {aliases[other]!r} on rank {rank}, to {name!r} on rank {part.rank}"
                )
    return aliases
