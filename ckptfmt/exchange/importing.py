"""Bringing a checkpoint of another tool into a repository: an ordinary save, of tensors that are still in its files."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from ckptfmt import connect
from ckptfmt.engine.families import Families
from ckptfmt.engine.reports import Report, VerifyReport
from ckptfmt.errors import Conflict, Corrupt
from ckptfmt.exchange.counting import Count, CountedFamily, Phases, nobody_looks
from ckptfmt.exchange.foreign import Foreign, open_foreign
from ckptfmt.exchange.foreign_family import source_families
from ckptfmt.generation import Generation
from ckptfmt.launching import LaunchOrder, begin_launch, ranks_of
from ckptfmt.policy import Modes, SavePolicy
from ckptfmt.ports.arrays import ArrayFamily

HOST_BYTES: Final = 256 << 20
"""Host memory for what is on its way from the source to the packs."""
FILES_LISTED_MAX: Final = 1000
"""Of the source, in the generation's metadata; a Zarr group may have millions."""
_COMMIT_TIMEOUT: Final = 3600.0


@dataclass(frozen=True)
class ImportReport(Report):
    """What was imported. ``name`` is the last part of the source's path; ``nbytes`` counts tensors once, ties included
    once; ``seconds`` include digests of the source and the verification of what was written."""

    report: str
    url: str
    run: str
    generation_id: int
    step: int
    key: str
    kind: str
    name: str
    files: int
    source_nbytes: int
    tensors: int
    values: int
    nbytes: int
    seconds: float


def import_checkpoint(
    source: Path,
    url: str,
    *,
    run: str = "default",
    step: int = 0,
    tags: Sequence[str] = (),
    catalog: str | None = None,
    storage_options: dict[str, Any] | None = None,
    host_bytes_max: int = HOST_BYTES,
    phases: Phases = nobody_looks,
) -> ImportReport:
    """Save what lies at ``source`` as a new generation of ``run``, verified and committed; the repository is made if it
    is not there.

    The generation's metadata tells under ``imported_from`` the kind, name, and each file's name, bytes and xxh3-128.
    At most ``host_bytes_max`` of host memory is used (with DCP also twice the largest box that a rank saved).
    ``phases`` is asked for one of the source's digests, of the save and of the verification after it.
    ``InvalidInput``, ``NotFound``, ``FormatError`` and ``Corrupt`` for the source, before anything is written where
    that can be told; ``Conflict`` if a file of it changed meanwhile: the generation is then quarantined.
    """
    began = time.perf_counter()
    with open_foreign(source) as foreign:
        state = foreign.state()
        provenance = _provenance(foreign, phases)
        connection = connect.open_site(url, mode="w", catalog=catalog, storage_options=storage_options)
        try:
            save = _Save(run, step, tags, host_bytes_max, metadata={"imported_from": provenance})
            with phases(f"saving {foreign.path.name}") as progress:
                families = _families(None if progress is None else Count(progress, foreign.nbytes))
                generation = save.of(state, connection, families)
            with phases(f"verifying #{generation.id}") as progress:
                report = generation.verify(progress)
            _check_written(connection, foreign, generation, report)
            return ImportReport(
                report="import",
                url=connection.url,
                run=generation.run,
                generation_id=generation.id,
                step=generation.step,
                key=generation.key,
                kind=foreign.kind,
                name=provenance["name"],
                files=provenance["files_count"],
                source_nbytes=provenance["nbytes"],
                tensors=len(generation),
                values=len(foreign.values),
                nbytes=generation.nbytes,
                seconds=time.perf_counter() - began,
            )
        finally:
            connection.close()


def _provenance(foreign: Foreign, phases: Phases) -> dict[str, Any]:
    """Where it came from, without the folders of this machine."""
    with phases(f"reading {foreign.path.name}") as progress:
        read = None if progress is None else Count(progress, foreign.files_nbytes).add
        files = [{"name": name, "nbytes": nbytes, "xxh3_128": digest} for name, nbytes, digest in foreign.digests(read)]
    found: dict[str, Any] = {
        "kind": foreign.kind,
        "name": foreign.path.name,
        "nbytes": sum(file["nbytes"] for file in files),
        "files_count": len(files),
        "files": files[:FILES_LISTED_MAX],
    }
    if foreign.metadata:
        found["metadata"] = dict(foreign.metadata)
    return found


@dataclass(frozen=True)
class _Save:
    """The one save of a launch of its own."""

    run: str
    step: int
    tags: Sequence[str]
    host_bytes_max: int
    metadata: Any

    def of(self, state: Any, connection: connect.Connection, families: Families) -> Generation:
        order = LaunchOrder(
            policy=SavePolicy(every_steps=None, every_seconds=None, on_busy="wait"),
            modes=Modes(1, self.host_bytes_max, "now"),
            signals=(),
            commit_timeout=_COMMIT_TIMEOUT,
            token=None,
            takeover=False,
            ranks=ranks_of(0, 1, None, "full"),
            place="auto",
        )
        with begin_launch(connection, self.run, order, families=lambda: families) as checkpointer:
            pending = checkpointer.save(state, step=self.step, metadata=self.metadata, tags=self.tags)
            assert pending is not None
            return pending.result()


def _families(count: Count | None) -> Families:
    live = connect.live_families()
    ours: list[ArrayFamily] = source_families()
    if count is None:
        return live.beside(ours)
    torch = live.named("tensor")  # of files that torch maps, its own tensors are saved
    if torch is not None:
        ours.append(torch)
    return live.beside([cast(ArrayFamily, CountedFamily(family, count)) for family in ours])


def _check_written(
    connection: connect.Connection, foreign: Foreign, generation: Generation, report: VerifyReport
) -> None:
    """What was read back must be what was written; and the source what its digests tell of."""
    name = foreign.changed()
    if name is None and report.ok:
        return
    if name is not None:
        reason = f"{name} changed while it was imported"
    else:
        reason = f"read back after the import, {report.problems[0].message}"
    connection.site.sql().quarantine(generation.id, reason=reason)
    told = f"generation {generation.id} of run {generation.run!r} is quarantined: {reason}"
    if name is not None:
        raise Conflict(f"{told}; import again when nobody writes to {foreign.path}", kind="source_changed")
    raise Corrupt(f"{told}; look at the storage with `ckptfmt doctor`, then import again")
