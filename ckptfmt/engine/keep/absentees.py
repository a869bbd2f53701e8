"""Whom an unfinished generation waits for in vain, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ckptfmt.engine import verdicts
from ckptfmt.engine.site import Site
from ckptfmt.errors import BackendError
from ckptfmt.format import layout
from ckptfmt.ports.records import GenerationRecord, RankRecord

_NAMED: Final = 10
"""So many ranks are named, and the others counted."""


def told_of(site: Site, row: GenerationRecord, ranks: Sequence[RankRecord]) -> str:
    """Why a generation that is ``writing`` cannot be finished, of whose ranks these are not durable in the catalog.

    Where only the coordinator speaks to the catalog it notes all ranks at once: none is durable there if one is lost.
    So those whose part lies on storage have done their share.
    """
    if not ranks:  # the rows of all ranks that save were made with the generation's
        return "its ranks are unknown, and never acknowledged"
    failed = [rank for rank in ranks if rank.error]
    told = [f"rank {rank.rank} failed: {rank.error}" for rank in failed[:_NAMED]]
    if len(failed) > _NAMED:
        told.append(f"{len(failed) - _NAMED} more ranks failed")
    parts = _parts(site, row)
    absent = [rank.rank for rank in ranks if not rank.error and layout.part_name(rank.rank) not in parts]
    if absent:
        told.append(f"{_named(absent)} never acknowledged")
    return "; ".join(told) or "all parts are there, but the catalog was never told of them"


def _parts(site: Site, row: GenerationRecord) -> set[str]:
    """Names of the objects in its folder. Empty where storage does not list them: then every rank is named."""
    try:
        return {found.key.rpartition("/")[2] for found in site.backend.list(verdicts.folder_of(row))}
    except BackendError:
        return set()


def _named(ranks: Sequence[int]) -> str:
    names = ", ".join(map(str, sorted(ranks)[:_NAMED]))
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {names}{more}"
