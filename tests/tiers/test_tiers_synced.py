"""What the catalog says of a tier is durable there already: files, and the folders that name them (FR-098)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiers_rig import state_of

import ckptfmt
from ckptfmt.backends.syscalls import Syscalls
from ckptfmt.catalog.sql import SqlCatalog


class _Unsynced:
    """Files and folders that were changed since they were last synced."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.paths: set[str] = set()
        self.lock = threading.Lock()
        self.synced = 0
        plain = {name: getattr(Syscalls, name) for name in ("open", "pwrite", "fsync", "link", "ftruncate")}

        def changes(*paths: str) -> None:
            with self.lock:
                self.paths.update(paths)

        def opens(kernel: Syscalls, path: str, flags: int, *mode: int) -> int:
            if flags & os.O_CREAT:
                changes(os.path.dirname(path))
            return int(plain["open"](kernel, path, flags, *mode))

        def changed(name: str) -> Callable[..., Any]:
            def call(kernel: Syscalls, descriptor: int, *arguments: Any) -> Any:
                changes(_path_of(descriptor))
                return plain[name](kernel, descriptor, *arguments)

            return call

        def links(kernel: Syscalls, source: str, target: str) -> None:
            changes(os.path.dirname(target), *([target] if source in self.paths else []))
            plain["link"](kernel, source, target)

        def syncs(kernel: Syscalls, descriptor: int) -> None:
            path = _path_of(descriptor)
            plain["fsync"](kernel, descriptor)
            with self.lock:
                self.paths.discard(path)
                self.synced += 1

        for name in ("pwrite", "ftruncate"):
            monkeypatch.setattr(Syscalls, name, changed(name))
        monkeypatch.setattr(Syscalls, "open", opens)
        monkeypatch.setattr(Syscalls, "link", links)
        monkeypatch.setattr(Syscalls, "fsync", syncs)


def _path_of(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("durable_on", [1, 2])
def test_fr098_every_tier_is_synced_before_the_catalog_says_so(
    tmp_path: Path, durable_on: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    unsynced = _Unsynced(monkeypatch)
    wrong: list[tuple[str, list[str]]] = []
    told: list[str] = []
    needed = ("stage", "durable", "replica")[: 1 + durable_on]

    def watch(name: str, *tiers: str) -> None:
        plain = getattr(SqlCatalog, name)

        def call(self: SqlCatalog, generation_id: int, *arguments: Any, **options: Any) -> Any:
            which = tiers
            if name == "report_rank":
                which = {"staged": ("stage",), "durable": needed}.get(options["state"], ())
            told.append(f"{name} {options.get('state', '')}".strip())
            row = self.generation(generation_id)
            assert row is not None
            with unsynced.lock:
                left = [path for path in unsynced.paths for tier in which if f"/{tier}/" in path and row.key in path]
            if left:
                wrong.append((told[-1], left))
            return plain(self, generation_id, *arguments, **options)

        monkeypatch.setattr(SqlCatalog, name, call)

    watch("report_rank")
    watch("mark_durable", "durable")
    watch("commit", "durable")
    watch("set_proven", "durable")
    watch("note_replicas", "replica")
    watch("mark_replicated", "replica")
    with (
        ckptfmt.open(
            tmp_path / "durable", stage=tmp_path / "stage", replicas=[tmp_path / "replica"], durable_on=durable_on
        ) as repository,
        repository.checkpointer("run") as checkpointer,
    ):
        for step in (1, 2):
            checkpointer.save(state_of(step), step=step).result(20)  # type: ignore[union-attr]
            checkpointer.wait(20)
    assert wrong == []
    assert set(told) >= {
        "report_rank staged",
        "report_rank durable",
        "mark_durable",
        "commit",
        "set_proven",
        "note_replicas",
        "mark_replicated",
    }
    assert unsynced.synced > 20
