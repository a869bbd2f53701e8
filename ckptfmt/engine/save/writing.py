"""C2 of one rank: its packs, its part and its acknowledgement; straight to the durable tier, or through the stage."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from ckptfmt.engine.packs import PackToCopy, packs_to_copy
from ckptfmt.engine.replicate import Copying, Pace, Source
from ckptfmt.engine.save.alone import ended
from ckptfmt.engine.save.context import LaunchContext, SaveOrder
from ckptfmt.engine.save.outcome import tell
from ckptfmt.engine.save.parts import make_part
from ckptfmt.engine.save.patience import Patience
from ckptfmt.engine.save.persist import Written, check_space, write_packs
from ckptfmt.engine.save.snapshot import Snapshot
from ckptfmt.engine.save.staging import Staged
from ckptfmt.engine.save.telling import ProgressTeller
from ckptfmt.errors import CkptError, Fenced, NotFound
from ckptfmt.format import layout
from ckptfmt.format.manifest import manifest_digest
from ckptfmt.format.part import Part, encode_part
from ckptfmt.format.states import State
from ckptfmt.ports.coordination import PartReport
from ckptfmt.ports.records import GenerationRecord

log = logging.getLogger("ckptfmt")


@dataclass(frozen=True)
class Share:
    """What one rank has on the durable tier, to be acknowledged."""

    part: Part
    report: PartReport
    """Without the part's name and digest."""
    sources: tuple[Source, ...]
    """Where its packs can be read, the nearest place first."""


class Writing:
    """One rank's share of one generation, from the snapshot to the acknowledgement."""

    def __init__(
        self,
        context: LaunchContext,
        order: SaveOrder,
        row: GenerationRecord,
        patience: Patience,
        begins: Callable[[str], object],
    ) -> None:
        """``begins`` is told the names of the objects that this rank begins in the generation's folder."""
        self._context = context
        self._order = order
        self._row = row
        self._patience = patience
        self._begins = begins
        self._folder = layout.generation_folder(row.run_key, row.key)

    def run(self, snapshot: Snapshot, let_go: Callable[[], None]) -> Share:
        """``let_go`` is called once, as soon as the snapshot's memory is needed no longer."""
        self._check_still_writing()
        staged, stager = None, self._context.stager
        if stager is not None:
            staged = stager.stage(self._row, snapshot, self._patience, partial(self._part, snapshot))
        if staged is None:
            share = self._written(snapshot)
        else:
            report = staged.report
            let_go()
            tell("that this rank has staged", lambda: self._context.coordination.staged(self._row, report))
            share = self._replicated(staged)
        share = self._spread(share)
        self._acknowledge(share)
        if staged is None:
            let_go()
        return share

    # -- C2b: onto the durable tier -------------------------------------------------------------
    def _written(self, snapshot: Snapshot) -> Share:
        backend, patience, rank = self._context.site.backend, self._patience, self._context.ranks.rank
        patience.repeat(lambda: check_space(backend, snapshot))
        try:
            written = write_packs(
                backend,
                self._folder,
                rank,
                snapshot,
                give_up=patience.give_up,
                passing=patience.remember,
                begins=self._begins,
            )
        except NotFound as error:
            raise self._overtaken() from error
        stall = snapshot.stall()  # waits for deferred copies, and raises if they are not to be used
        report = PartReport(
            rank=rank,
            part_name="",
            part_digest="",
            nbytes=snapshot.plan.tensor_bytes,
            stall_seconds=stall,
            write_seconds=written.seconds,
            retries=written.retries,
        )
        return Share(self._part(snapshot, written), report, (Source(backend),))

    def _replicated(self, staged: Staged) -> Share:
        """Copy what is staged: what fails is copied again under another name, which the part then tells."""
        told, rank, began = staged.report, self._context.ranks.rank, time.perf_counter()
        packs = packs_to_copy(staged.part)
        self._check_still_writing()
        retries: list[CkptError] = []

        def passing(error: CkptError) -> None:
            retries.append(error)
            self._patience.remember(error)

        teller = ProgressTeller(self._context.coordination, self._row, rank)
        pace = Pace(
            limiter=self._context.site.tiers.limiter,
            give_up=lambda: self._go_on(teller),
            copied=teller.add,
            passing=passing,
            begins=self._begins,
        )
        copying = Copying([Source(staged.tier.backend)], self._context.site.backend, self._folder, pace)
        try:
            names = copying.copy(packs, partial(layout.pack_name, rank))
        except NotFound as error:
            if self._context.site.backend.has_folder(self._folder):
                raise
            raise self._overtaken() from error
        rows = [msgspec.structs.replace(pack.row, name=name) for pack, name in zip(packs, names, strict=True)]
        report = PartReport(
            rank=rank,
            part_name="",
            part_digest="",
            nbytes=told.nbytes,
            stall_seconds=told.stall_seconds,
            write_seconds=time.perf_counter() - began,
            retries=told.retries + len(retries),
            staged_tier=told.tier,
            staged_bytes=told.staged_bytes,
            staged_seconds=told.staged_seconds,
        )
        there = {name: pack.row.name for pack, name in zip(packs, names, strict=True)}
        sources = (Source(staged.tier.backend, there), Source(self._context.site.backend))
        return Share(msgspec.structs.replace(staged.part, packs=rows), report, sources)

    def _spread(self, share: Share) -> Share:
        """With ``durable_on``: onto so many replicas as well, before this rank acknowledges."""
        tiers = self._context.site.tiers
        chosen = tiers.replicas[: tiers.durable_on - 1]
        if not chosen:
            return share
        packs = packs_to_copy(share.part)
        pace = Pace(limiter=tiers.limiter, give_up=self._patience.give_up, passing=self._patience.remember)
        for tier in chosen:
            self._patience.repeat(partial(tier.backend.make_folder, self._folder))
            copying = Copying(share.sources, tier.backend, self._folder, pace, replaces=True)
            copying.copy(packs, partial(_same_name, packs))
        return replace(share, part=msgspec.structs.replace(share.part, tiers=sorted(tier.uuid for tier in chosen)))

    # -- C2c ------------------------------------------------------------------------------------
    def _acknowledge(self, share: Share) -> None:
        context, patience, name = self._context, self._patience, layout.part_name(self._context.ranks.rank)
        stored = encode_part(share.part)
        self._check_still_writing()
        self._begins(name)
        patience.repeat(lambda: context.site.backend.create(f"{self._folder}/{name}", stored))
        report = replace(share.report, part_name=name, part_digest=manifest_digest(stored))
        patience.repeat(lambda: context.coordination.report(self._row, report))

    # -- what all of it needs -------------------------------------------------------------------
    def _part(self, snapshot: Snapshot, written: Written) -> Part:
        context, order = self._context, self._order
        return make_part(
            snapshot,
            written,
            key=order.key,
            step=order.step,
            launch_digest=layout.launch_digest(context.launch.token),
            save_number=order.n,
            ranks=context.ranks,
            created_at=order.created_at,
        )

    def _go_on(self, teller: ProgressTeller) -> None:
        self._patience.give_up()
        teller.check()

    def _check_still_writing(self) -> None:
        """A rank that finds its generation no longer ``writing`` stops."""
        now = self._patience.repeat(lambda: self._context.coordination.look(self._row))
        if now.state is not State.WRITING:
            raise ended(now)

    def _overtaken(self) -> Fenced:
        row = self._row
        return Fenced(f"the folder of generation {row.id} (run {row.run!r}) is gone: a newer launch has taken the run")


def _same_name(packs: Sequence[PackToCopy], position: int, attempt: int) -> str:
    return packs[position].row.name
