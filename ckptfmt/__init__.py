"""Training checkpoints that are committed, whole and verified, or invisible. See README.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

_HOMES = {
    "ckptfmt.oneshot": ("State", "load", "open", "restore", "save"),
    "ckptfmt.engine.patterns": ("Patterns",),
    "ckptfmt.engine.save.progress": ("Stage",),
    "ckptfmt.reference": ("At",),
    "ckptfmt.format.tree": ("Foreign", "register_type"),
    "ckptfmt.rng": ("Rng",),
    "ckptfmt.leaves": ("PerRank", "Sharded"),
    "ckptfmt.repository": ("Repository",),
    "ckptfmt.checkpointer": ("Checkpointer",),
    "ckptfmt.pending": ("PendingSave",),
    "ckptfmt.generation": ("Generation", "StoredTensor"),
    "ckptfmt.engine.reports": (
        "GcReport",
        "GenerationInfo",
        "RecoverReport",
        "RestoreReport",
        "RunInfo",
        "VerifyReport",
    ),
    "ckptfmt.__about__": ("__version__",),
    "ckptfmt.errors": (
        "AccessDenied",
        "BackendError",
        "CatalogBehind",
        "CatalogError",
        "CkptError",
        "Conflict",
        "Corrupt",
        "DrillFailed",
        "Fenced",
        "FormatError",
        "InvalidInput",
        "Mismatch",
        "NotCommitted",
        "NotFound",
        "OutOfSpace",
        "OutcomeUnknown",
        "SaveFailed",
        "Unavailable",
        "UnsupportedValue",
        "UnsupportedVersion",
        "Unverifiable",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_BESIDE = {"Foreign", "__version__"}
"""Importable, but no part of the surface that ``from ckptfmt import *`` gives."""

__all__ = sorted(_HOME_OF.keys() - _BESIDE)

if TYPE_CHECKING:
    from ckptfmt.__about__ import __version__ as __version__
    from ckptfmt.checkpointer import Checkpointer as Checkpointer
    from ckptfmt.engine.patterns import Patterns as Patterns
    from ckptfmt.engine.reports import GcReport as GcReport
    from ckptfmt.engine.reports import GenerationInfo as GenerationInfo
    from ckptfmt.engine.reports import RecoverReport as RecoverReport
    from ckptfmt.engine.reports import RestoreReport as RestoreReport
    from ckptfmt.engine.reports import RunInfo as RunInfo
    from ckptfmt.engine.reports import VerifyReport as VerifyReport
    from ckptfmt.engine.save.progress import Stage as Stage
    from ckptfmt.errors import AccessDenied as AccessDenied
    from ckptfmt.errors import BackendError as BackendError
    from ckptfmt.errors import CatalogBehind as CatalogBehind
    from ckptfmt.errors import CatalogError as CatalogError
    from ckptfmt.errors import CkptError as CkptError
    from ckptfmt.errors import Conflict as Conflict
    from ckptfmt.errors import Corrupt as Corrupt
    from ckptfmt.errors import DrillFailed as DrillFailed
    from ckptfmt.errors import Fenced as Fenced
    from ckptfmt.errors import FormatError as FormatError
    from ckptfmt.errors import InvalidInput as InvalidInput
    from ckptfmt.errors import Mismatch as Mismatch
    from ckptfmt.errors import NotCommitted as NotCommitted
    from ckptfmt.errors import NotFound as NotFound
    from ckptfmt.errors import OutcomeUnknown as OutcomeUnknown
    from ckptfmt.errors import OutOfSpace as OutOfSpace
    from ckptfmt.errors import SaveFailed as SaveFailed
    from ckptfmt.errors import Unavailable as Unavailable
    from ckptfmt.errors import UnsupportedValue as UnsupportedValue
    from ckptfmt.errors import UnsupportedVersion as UnsupportedVersion
    from ckptfmt.errors import Unverifiable as Unverifiable
    from ckptfmt.format.tree import Foreign as Foreign
    from ckptfmt.format.tree import register_type as register_type
    from ckptfmt.generation import Generation as Generation
    from ckptfmt.generation import StoredTensor as StoredTensor
    from ckptfmt.leaves import PerRank as PerRank
    from ckptfmt.leaves import Sharded as Sharded
    from ckptfmt.oneshot import State as State
    from ckptfmt.oneshot import load as load
    from ckptfmt.oneshot import open as open
    from ckptfmt.oneshot import restore as restore
    from ckptfmt.oneshot import save as save
    from ckptfmt.pending import PendingSave as PendingSave
    from ckptfmt.reference import At as At
    from ckptfmt.repository import Repository as Repository
    from ckptfmt.rng import Rng as Rng


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'ckptfmt' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
