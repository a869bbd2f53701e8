"""One listing of all runs: which folders, objects and commit hints there are. Names only; nothing is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ckptfmt.errors import FormatError
from ckptfmt.format import layout
from ckptfmt.ports.backend import Backend


@dataclass
class RunSurvey:
    """What lies in the folder of one run."""

    run_key: str
    hints: list[layout.CommitHint] = field(default_factory=list)
    """In the order in which names sort."""
    folders: dict[str, dict[str, int]] = field(default_factory=dict)
    """Generation key -> object name -> bytes. A folder that holds nothing is not listed."""


def survey(backend: Backend) -> list[RunSurvey]:
    """Look at everything under the runs of a root. Sorted by run key."""
    runs: dict[str, RunSurvey] = {}
    for info in backend.list(layout.RUNS):
        _, _, place = info.key.partition("/")
        run_key, _, place = place.partition("/")
        folder, _, name = place.partition("/")
        if not name or "/" in name:
            continue  # nothing of a generation lies there
        run = runs.get(run_key) or runs.setdefault(run_key, RunSurvey(run_key))
        names = run.folders.get(folder)
        if names is not None:
            names[name] = info.nbytes
        elif folder == "commits":
            hint = layout.parse_commit_hint(name)
            if hint is not None:
                run.hints.append(hint)
        elif is_key(folder):
            run.folders[folder] = {name: info.nbytes}
    return [runs[key] for key in sorted(runs)]


def is_key(name: str) -> bool:
    """Whether a folder's name may be a generation's key."""
    try:
        layout.validate_generation_key(name)
    except FormatError:
        return False
    return True


def nbytes_of(names: Mapping[str, int]) -> int:
    return sum(names.values())
