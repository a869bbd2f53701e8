"""The folder of a URL, for verbs that try out a place and not a repository."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from ckptfmt.connect import backend_for
from ckptfmt.errors import InvalidInput
from ckptfmt.reference import parse_reference


def local_folder(url: str, verb: str) -> Path:
    """The absolute folder that ``url`` names, whether or not it is there. ``InvalidInput`` if it is none."""
    reference = parse_reference(url)
    if reference.run is not None:
        raise InvalidInput(f"{verb} tries out a place, not a run: leave out #{reference.run}")
    backend = backend_for(reference.url)
    try:
        scheme, _, path, *_ = urlsplit(backend.url)
        if scheme != "file":
            raise InvalidInput(f"{backend.url}: {verb} tries out folders of this machine; give a path or file://...")
        return Path(unquote(path))
    finally:
        backend.close()


def nearest_folder(wanted: Path) -> Path:
    """``wanted`` if it is there, else the nearest folder above it. ``InvalidInput`` if a file is in the way."""
    found = wanted
    while not found.exists():
        found = found.parent
    if not found.is_dir():
        raise InvalidInput(f"{wanted}: {found} is a file, so no folder can be there; give another path")
    return found
