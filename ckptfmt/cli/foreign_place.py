"""Whether a verb was given a checkpoint of another tool instead of a repository."""

from __future__ import annotations

from pathlib import Path

from ckptfmt.exchange.foreign import kind_of, local_path


def foreign_path(url: str) -> Path | None:
    """The path of what is no repository, but a file or folder that `ckptfmt import` reads (a file in any case: no
    repository is one); None for everything else."""
    path = local_path(url)
    try:
        if path is None or not path.exists():
            return None
        return path if path.is_file() or kind_of(path) is not None else None
    except (OSError, ValueError):  # whoever opens it says what is wrong
        return None
