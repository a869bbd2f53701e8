"""The tiers that a command line works on: those it names, and those that the catalog knows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ckptfmt import connect
from ckptfmt.errors import CkptError, InvalidInput
from ckptfmt.tiering import TierOrder, with_tiers

if TYPE_CHECKING:
    from ckptfmt.engine.site import Site
    from ckptfmt.engine.tiers import Tier
    from ckptfmt.ports.records import TierRecord


@dataclass(frozen=True)
class Unreachable:
    """A tier that the catalog knows and that cannot be opened from here."""

    record: TierRecord
    why: str


def with_known_tiers(
    connection: connect.Connection, stage: str | None, replicas: Sequence[str]
) -> tuple[connect.Connection, tuple[Unreachable, ...]]:
    """``connection`` with the tiers that were named, which must be usable, and those that the catalog knows, of which
    the others are told."""
    opened = with_tiers(connection, TierOrder(stage, tuple(replicas)))
    with connect.closed_on_error(opened):
        _require_named(opened.site, stage, replicas)
        site, unreachable = _with_others(opened.site)
    return replace(opened, site=site), unreachable


def _require_named(site: Site, stage: str | None, replicas: Sequence[str]) -> None:
    """Reading, one that cannot be used is left out with a warning: not here, where somebody asked for it."""
    if stage is not None and site.tiers.stage is None:
        raise InvalidInput(f"--stage {stage}: it is no stage of {site.backend.url} on this host")
    if len(replicas) != len(site.tiers.replicas):
        raise InvalidInput(
            f"--replica: of {', '.join(replicas)} not all are replicas of {site.backend.url}; open it for writing with "
            "replicas=[...] to make one"
        )


def _with_others(site: Site) -> tuple[Site, tuple[Unreachable, ...]]:
    if site.catalog is None:
        return site, ()
    named = {tier.uuid for tier in site.tiers.every()}
    stage, replicas, lost = site.tiers.stage, list(site.tiers.replicas), []
    with ExitStack() as others:
        for record in site.catalog.tiers():
            if record.uuid in named or not _is_near(record) or (record.role == "stage" and stage is not None):
                continue
            try:
                tier = _opened(record)
            except CkptError as error:
                lost.append(Unreachable(record, str(error)))
                continue
            others.callback(tier.backend.close)
            if tier.role == "stage":
                stage = tier
            else:
                replicas.append(tier)
        others.pop_all()
    return replace(site, tiers=replace(site.tiers, stage=stage, replicas=tuple(replicas))), tuple(lost)


def _is_near(record: TierRecord) -> bool:
    from ckptfmt.engine import process

    return record.role == "replica" or (record.role == "stage" and record.host == process.host_name())


def _opened(record: TierRecord) -> Tier:
    """The tier where it was last seen, if it is still there."""
    from ckptfmt.engine import tier_marks
    from ckptfmt.engine.tiers import Tier

    backend = connect.backend_for(record.url)
    with connect.closed_on_error(backend):
        mark = tier_marks.read_mark(backend)
        if mark is None or mark.tier != record.uuid:
            raise InvalidInput(
                f"{record.url} is not the tier {record.uuid}: its mark, tier.json, is gone or another one's"
            )
    return Tier(record.uuid, mark.role, backend, record.host)
