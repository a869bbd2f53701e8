"""``verify``: read every byte of a generation, on every tier that holds it, and compare it with its digest.

Finds all damage, not the first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from ckptfmt.engine import protocol
from ckptfmt.engine.arena import PAGE, map_memory
from ckptfmt.engine.opened import Opened
from ckptfmt.engine.read import check_chunk, read_header
from ckptfmt.engine.read_plan import ReadUnit, Region, StoredBox, plan_reads, read_units
from ckptfmt.engine.reports import Problem, VerifiedTier, VerifyReport
from ckptfmt.engine.rereading import read_whole
from ckptfmt.engine.tiers import Tier
from ckptfmt.engine.transfer import run_all
from ckptfmt.engine.units import align_up
from ckptfmt.errors import BackendError, Corrupt, FormatError, NotFound
from ckptfmt.format import layout, pack
from ckptfmt.format.tables import PackRow

Progress = Callable[[int, int], None]
"""(bytes done, bytes in all); called from worker threads."""


@dataclass(frozen=True)
class Held:
    """An object on a tier that should hold the bytes of a pack: the pack itself, or a repair of it."""

    row: PackRow
    pack: str
    """Key of the pack."""
    key: str
    """Of the object."""


@dataclass(frozen=True)
class Findings:
    """What was found on one tier."""

    tier: Tier
    held: tuple[Held, ...]
    problems: tuple[Problem, ...]
    repaired: tuple[Problem, ...]
    """What is wrong with packs beside which a whole repair lies."""
    absent: tuple[str, ...] = ()
    """Keys of packs that a tier other than the durable one lacks: it need not have any."""
    nbytes: int = 0
    chunks: int = 0

    @property
    def damaged(self) -> frozenset[str]:
        """Keys of the packs of which it holds objects, but none that is whole."""
        objects = {problem.object for problem in self.problems}
        return frozenset(held.pack for held in self.held if held.key in objects)


def verify(opened: Opened, progress: Progress | None = None) -> VerifyReport:
    """Check pack headers and every chunk, on every tier. The report lists every problem with object, tensor, offset."""
    began = time.perf_counter()
    found = inspect_tiers(opened, progress)
    return VerifyReport(
        generation_id=opened.info.id,
        run=opened.info.run,
        step=opened.info.step,
        nbytes=sum(one.nbytes for one in found),
        chunks=sum(one.chunks for one in found),
        seconds=time.perf_counter() - began,
        problems=tuple(problem for one in found for problem in one.problems),
        repaired=tuple(problem for one in found for problem in one.repaired),
        tiers=tuple(_summed_up(one) for one in found),
    )


def inspect_tiers(opened: Opened, progress: Progress | None = None) -> list[Findings]:
    """Read all that each tier holds of a generation; the durable one should hold everything."""
    scan = _Scan(opened, progress)
    opened.nearest.repairs.forget()
    durable_first = sorted(opened.nearest.tiers, key=lambda tier: tier.role != "durable")
    plans = [(tier, *_held(opened, tier)) for tier in durable_first]
    scan.expect(held for _, present, _ in plans for held in present)
    return [_with_repairs(opened, scan, tier, present, absent) for tier, present, absent in plans]


def _held(opened: Opened, tier: Tier) -> tuple[list[Held], list[str]]:
    """What to read on a tier, and what it lacks. Of the durable tier everything is read, so that it is missed."""
    packs = {protocol.pack_key(opened.folder, row): row for row in opened.manifest.packs}
    absent: list[str] = []
    if tier.role != "durable":
        try:
            faults = protocol.pack_faults(tier.backend, opened.folder, opened.manifest, opened.manifest.packs)
            # A copy under way, or that of a dead process, has another length until it is whole: that is no damage.
            proven = not faults or _is_proven_there(opened, tier)
            absent = [key for key, fault in faults.items() if isinstance(fault, NotFound) or not proven]
        except BackendError:
            pass  # reading says why
    return [Held(row, key, key) for key, row in packs.items() if key not in absent], absent


def _is_proven_there(opened: Opened, tier: Tier) -> bool:
    """Whether the tier says that it holds the generation: COMMIT.json comes after all packs. A stage never does."""
    key = f"{opened.folder}/{layout.COMMIT}" if opened.folder else layout.COMMIT
    try:
        tier.backend.head(key)
    except NotFound:
        return False
    return True


def _with_repairs(opened: Opened, scan: _Scan, tier: Tier, present: Sequence[Held], absent: Sequence[str]) -> Findings:
    problems, nbytes, chunks = scan.read(tier, present)
    wanting = {problem.object for problem in problems} | set(absent)
    rows = {protocol.pack_key(opened.folder, row): row for row in opened.manifest.packs}
    pack_of = {key: key for key in rows}
    healed: set[str] = set()
    held = list(present)
    for key in sorted(wanting):
        for repair in opened.nearest.repairs.of(tier, key):
            pack_of[repair] = key
            held.append(Held(rows[key], key, repair))
            wrong, more, read = scan.read(tier, held[-1:])
            nbytes, chunks = nbytes + more, chunks + read
            problems += wrong
            if not wrong:
                healed.add(key)
                break
    return Findings(
        tier,
        tuple(held),
        tuple(problem for problem in problems if pack_of[problem.object] not in healed),
        tuple(problem for problem in problems if pack_of[problem.object] in healed),
        tuple(key for key in absent if key not in healed),
        nbytes,
        chunks,
    )


def _summed_up(found: Findings) -> VerifiedTier:
    return VerifiedTier(
        role=found.tier.role,
        url=found.tier.backend.url,
        packs=len({held.pack for held in found.held}),
        absent=len(found.absent),
        nbytes=found.nbytes,
        problems=len(found.problems),
        repaired=len({problem.object for problem in found.repaired}),
    )


class _Scan:
    """Reads objects through small windows and notes every problem."""

    def __init__(self, opened: Opened, progress: Progress | None) -> None:
        self._opened = opened
        self._progress = progress
        self._named = bool(opened.site.tiers)
        self._done = self._total = 0
        self._regions: dict[str, list[Region]] = {}
        for region in plan_reads(box for tensor in opened.stored.all for box in tensor.boxes).regions:
            self._regions.setdefault(region.pack, []).append(region)

    def expect(self, held: Iterable[Held]) -> None:
        """Of so much progress is told."""
        wanted = (region for one in held for region in self._regions.get(one.pack, ()))
        self._total = sum(box.nbytes for region in wanted for box in region.boxes)

    def read(self, tier: Tier, objects: Sequence[Held]) -> tuple[list[Problem], int, int]:
        """(problems by object and offset, bytes compared, chunks compared)"""
        problems = [found for one in objects if (found := self._check_header(tier, one)) is not None]
        work = [
            (one, unit) for one in objects for region in self._regions.get(one.pack, ()) for unit in read_units(region)
        ]

        def scan(share: Sequence[tuple[Held, ReadUnit]]) -> None:
            window = map_memory(max((align_up(unit.stop - unit.start) for _, unit in share), default=1) + PAGE)
            for one, unit in share:
                at = unit.start % PAGE  # as aligned as in the file
                problems.extend(self._check_unit(tier, one, unit, window[at : at + unit.stop - unit.start]))
                self._done += sum(nbytes for *_, nbytes in unit.chunks)
                if self._progress is not None:
                    self._progress(self._done, max(self._done, self._total))

        workers = max(1, min(self._opened.nearest.threads_on(tier), len(work)))
        shares = [work[number::workers] for number in range(workers)]
        run_all([lambda share=share: scan(share) for share in shares], threads=workers, name="ckptfmt-verify")  # type: ignore[misc]
        nbytes = sum(nbytes for _, unit in work for *_, nbytes in unit.chunks)
        problems.sort(key=lambda item: (item.object, item.offset or 0))
        return problems, nbytes, sum(len(unit.chunks) for _, unit in work)

    def _check_unit(self, tier: Tier, one: Held, unit: ReadUnit, window: memoryview) -> list[Problem]:
        try:
            tier.backend.read_into(one.key, unit.start, window)
        except (BackendError, Corrupt, NotFound) as error:
            return [self._problem(tier, one, error, tensor=unit.chunks[0][0].tensor, offset=unit.start)]
        problems = []
        for box, number, offset, nbytes in unit.chunks:
            place = box if one.key == one.pack else replace(box, pack=one.key)
            try:
                _compare(tier, place, number, offset, window[offset - unit.start : offset - unit.start + nbytes])
            except (BackendError, Corrupt, NotFound) as error:
                problems.append(self._problem(tier, one, error, tensor=box.tensor, offset=offset))
        return problems

    def _check_header(self, tier: Tier, one: Held) -> Problem | None:
        """The header's bytes against their digest, and as a header."""
        try:
            pack.parse_header(read_header(tier.backend, one.key, one.row), one.row.nbytes)
        except (FormatError, BackendError, NotFound) as error:
            return self._problem(tier, one, error, tensor=None, offset=0)
        return None

    def _problem(
        self, tier: Tier, one: Held, error: FormatError | BackendError | NotFound, *, tensor: str | None, offset: int
    ) -> Problem:
        url = tier.backend.url if self._named else None
        return Problem(error.kind, one.key, str(error), tensor=tensor, offset=offset, tier=url)


def _compare(tier: Tier, box: StoredBox, number: int, offset: int, data: memoryview) -> None:
    """Compare a chunk that was read with its digest; while it differs, read it once more."""
    is_read = True

    def read() -> None:
        nonlocal is_read
        if not is_read:
            tier.backend.read_into(box.pack, offset, data)
        is_read = False
        check_chunk(box, number, offset, data)

    read_whole(read)
