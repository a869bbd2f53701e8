"""All probes in order, in a folder of their own that goes when they are done."""

from __future__ import annotations

import tempfile
from pathlib import Path

from ckptfmt.backends.posix import PosixBackend
from ckptfmt.backends.syscalls import Syscalls
from ckptfmt.doctor import copies, files, host, memory, place, races
from ckptfmt.doctor.report import Diagnosis, Finding

PREFIX = "ckptfmt-doctor-"


def examine(url: str, wanted: Path, folder: Path, syscalls: Syscalls | None = None) -> Diagnosis:
    """Try out ``folder``: ``wanted`` itself, or the nearest folder above it that exists. Nothing stays behind."""
    calls = syscalls if syscalls is not None else Syscalls()
    findings = [*_of_storage(wanted, folder, calls), place.sqlite(), *_of_host()]
    ok = all(finding.status != "bad" for finding in findings)
    return Diagnosis("doctor", url, str(folder), ok, tuple(findings))


def _of_storage(wanted: Path, folder: Path, calls: Syscalls) -> list[Finding]:
    try:
        made = tempfile.TemporaryDirectory(prefix=PREFIX, dir=folder)
    except OSError as error:
        return [place.writable(wanted, folder, error), place.file_system(folder)]
    with made as name:
        inside = Path(name)
        return [
            place.writable(wanted, folder, None),
            place.file_system(folder),
            place.space(folder, calls),
            files.direct_io(inside, calls),
            files.reservation(inside, calls),
            files.file_sync(inside, calls),
            files.folder_sync(inside, calls),
            files.hard_links(inside, calls),
            races.conditional_create(lambda root: PosixBackend(root, syscalls=calls), inside),
            host.cached_pages(inside, calls),
        ]


def _of_host() -> list[Finding]:
    return [
        memory.available(),
        memory.huge_pages(),
        copies.copies(),
        memory.advice(),
        memory.locked_memory(),
        host.descriptors(),
        host.cores(),
    ]
