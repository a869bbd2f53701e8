"""Repair: good bytes under a new name beside what is damaged or gone, and an object that says so. Nothing is written
over (spec/tiers.md, "Repair")."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

from ckptfmt.engine.keep.pieces import Pieces
from ckptfmt.engine.keep.replicas import sources_for
from ckptfmt.engine.keep.verify import Findings, Progress, inspect_tiers
from ckptfmt.engine.opened import Opened
from ckptfmt.engine.packs import PackToCopy, packs_to_copy
from ckptfmt.engine.replicate import Copying, Pace
from ckptfmt.engine.reports import Report
from ckptfmt.engine.tiers import Tier
from ckptfmt.errors import CkptError
from ckptfmt.format import layout, verdict
from ckptfmt.format.manifest import manifest_digest
from ckptfmt.ports.backend import Backend
from ckptfmt.ports.records import ReplicaPack


@dataclass(frozen=True)
class RepairItem(Report):
    """One pack that is damaged or gone on one tier."""

    generation_id: int
    run: str
    step: int
    role: str
    tier: str
    """URL of the tier."""
    object: str
    nbytes: int
    reason: str
    sources: tuple[str, ...]
    """URLs of the tiers that have the pack whole; the word "pieces" where only all together have it; empty: nowhere."""
    written: str | None = None
    """Key of the object that has its bytes now."""
    problem: str | None = None
    """Why it was not repaired, or cannot be."""

    @property
    def repairable(self) -> bool:
        return bool(self.sources) and self.problem is None


@dataclass(frozen=True)
class _Wanted:
    item: RepairItem
    tier: Tier
    pack: PackToCopy


def repair(opened: Opened, *, dry_run: bool, pace: Pace, progress: Progress | None = None) -> list[RepairItem]:
    """Find what is damaged or gone on the durable tier and on replicas that hold the generation, and (unless
    ``dry_run``) repair it. A stage is not repaired: it only makes reading faster."""
    found = inspect_tiers(opened, progress)
    packs = {
        f"{opened.folder}/{pack.row.name}" if opened.folder else pack.row.name: pack
        for pack in packs_to_copy(opened.manifest)
    }
    wanted: list[_Wanted] = []
    lost: list[RepairItem] = []
    for one in found:
        for key in sorted(_wanting(opened, one)):
            item = _item(opened, found, one, key)
            if key in packs:
                wanted.append(_Wanted(_with_pieces(opened, item, packs[key]), one.tier, packs[key]))
            else:
                lost.append(replace(item, problem="the pack is another generation's: repair that one"))
    if dry_run:
        return [*(each.item for each in wanted), *lost]
    done = []
    for tier in {each.tier.uuid: each.tier for each in wanted}.values():
        done += _repair_on(opened, tier, [each for each in wanted if each.tier.uuid == tier.uuid], pace)
    return [*done, *lost]


def _wanting(opened: Opened, found: Findings) -> set[str]:
    """Packs that the tier should have whole and has not. A replica should have them once it has the verdict."""
    if found.tier.role == "stage":
        return set()
    return set(found.damaged) | set(found.absent if _is_committed_on(opened, found.tier) else ())


def _is_committed_on(opened: Opened, tier: Tier) -> bool:
    key = f"{opened.folder}/{layout.COMMIT}"
    try:
        tier.backend.head(key)
    except CkptError:
        return False
    return True


def _item(opened: Opened, found: Sequence[Findings], on: Findings, key: str) -> RepairItem:
    objects = {held.key for held in on.held if held.pack == key}
    reasons = [problem.message for problem in on.problems if problem.object in objects]
    whole = [
        one.tier.backend.url
        for one in found
        if one is not on and any(held.pack == key for held in one.held) and key not in one.damaged
    ]
    rows = {pack.name: pack.nbytes for pack in opened.manifest.packs}
    return RepairItem(
        generation_id=opened.info.id,
        run=opened.info.run,
        step=opened.info.step,
        role=on.tier.role,
        tier=on.tier.backend.url,
        object=key,
        nbytes=rows[key.rpartition("/")[2]],
        reason=reasons[0] if reasons else f"{key} is not there",
        sources=tuple(whole),
    )


def _with_pieces(opened: Opened, item: RepairItem, pack: PackToCopy) -> RepairItem:
    """Where no other tier has all of it, all together may."""
    if item.sources:
        return item
    together = Copying([], cast(Backend, Pieces(opened)), opened.folder)
    if together.holds(pack, pack.row.name):
        return replace(item, sources=("pieces",))
    return replace(item, problem="no tier has it whole, nor all together: restore an older generation")


def _repair_on(opened: Opened, tier: Tier, wanted: Sequence[_Wanted], pace: Pace) -> list[RepairItem]:
    """Write what can be had, then one object that names all of it, then the catalog's rows."""
    good = [each for each in wanted if each.item.repairable]
    left = [each.item for each in wanted if not each.item.repairable]
    if not good:
        return left
    packs = [each.pack for each in good]
    copying = Copying(sources_for(opened, tier), tier.backend, opened.folder, pace)

    def name_of(position: int, attempt: int) -> str:
        return layout.repaired_pack_name(packs[position].row.name, attempt + 1)

    try:
        names = copying.copy(packs, name_of)
        _tell(opened, tier, {pack.row.name: name for pack, name in zip(packs, names, strict=True)})
    except CkptError as error:
        return [*(replace(each.item, problem=str(error)) for each in good), *left]
    written = [replace(each.item, written=f"{opened.folder}/{name}") for each, name in zip(good, names, strict=True)]
    return [*written, *left]


def _tell(opened: Opened, tier: Tier, names: dict[str, str]) -> None:
    site, key = opened.site, opened.info.key
    data = verdict.encode_repair(verdict.Repair(repository=site.repository, key=key, packs=dict(sorted(names.items()))))
    tier.backend.create(f"{opened.folder}/{layout.repair_name(manifest_digest(data))}", data)
    opened.nearest.repairs.forget()
    catalog = site.sql()
    catalog.ensure_tier(tier.uuid, role=tier.role, url=tier.backend.url, host=tier.host)
    packs = [ReplicaPack(key, pack, name) for pack, name in names.items()]
    catalog.note_replicas(opened.info.id, tier.uuid, packs)
