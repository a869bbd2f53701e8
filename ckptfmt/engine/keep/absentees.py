"""Whom an unfinished generation waits for in vain, in words."""

from __future__ import annotations

from collections.abc import Sequence

from ckptfmt.engine import verdicts
from ckptfmt.engine.site import Site
from ckptfmt.errors import BackendError
from ckptfmt.format import layout
from ckptfmt.format.naming import NAMED_MAX, ranks_shown
from ckptfmt.ports.records import GenerationRecord, RankRecord


def told_of(site: Site, row: GenerationRecord, ranks: Sequence[RankRecord]) -> str:
    """Why a generation that is ``writing`` cannot be finished, of whose ranks these are not durable in the catalog.

    Where only the coordinator speaks to the catalog it notes all ranks at once: none is durable there if one is lost.
    So those whose part lies on storage have done their share.
    """
    if not ranks:  # the rows of all ranks that save were made with the generation's
        return "its ranks are unknown, and never acknowledged"
    failed = [rank for rank in ranks if rank.error]
    told = [f"rank {rank.rank} failed: {rank.error}" for rank in failed[:NAMED_MAX]]
    if len(failed) > NAMED_MAX:
        told.append(f"{len(failed) - NAMED_MAX} more ranks failed")
    told += _staged(site, ranks)
    parts = _parts(site, row)
    absent = [rank.rank for rank in ranks if not rank.error and layout.part_name(rank.rank) not in parts]
    if absent:
        told.append(f"{ranks_shown(sorted(absent))} never acknowledged")
    return "; ".join(told) or "all parts are there, but the catalog was never told of them"


def _staged(site: Site, ranks: Sequence[RankRecord]) -> list[str]:
    """Where the packs of dead ranks may lie: whoever recovers there, with that stage, can finish them."""
    by_tier: dict[str, list[int]] = {}
    for rank in ranks:
        if rank.staged_tier is not None and not rank.error:
            by_tier.setdefault(rank.staged_tier, []).append(rank.rank)
    if not by_tier:
        return []
    known = {tier.uuid: tier for tier in site.sql().tiers()}
    told = []
    for uuid, members in by_tier.items():
        tier = known.get(uuid)
        where = f"tier {uuid}" if tier is None else f"host {tier.host} ({tier.url})"
        told.append(f"{ranks_shown(sorted(members))} staged on {where}")
    return told


def _parts(site: Site, row: GenerationRecord) -> set[str]:
    """Names of the objects in its folder. Empty where storage does not list them: then every rank is named."""
    try:
        return {found.key.rpartition("/")[2] for found in site.backend.list(verdicts.folder_of(row))}
    except BackendError:
        return set()
