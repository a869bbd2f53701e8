"""A catalog that fails on command: a wrapper that counts every call and breaks the chosen ones.

    catalog = FaultyCatalog(open_catalog(...), Fault("commit", error=unreachable, timing="after"))

The faults are those of ``ckptfmt.testing.faults``. A method of a catalog is one transaction, all or nothing, so that
``torn`` is the same as ``before``; ``after`` is the lost answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from ckptfmt.errors import CatalogError
from ckptfmt.ports.catalog import Catalog
from ckptfmt.testing.faults import Fault, FaultyCalls

__all__ = ["CATALOG_CHANGES", "FaultyCatalog", "unreachable"]

CATALOG_CHANGES: Final = frozenset(
    {
        "abort",
        "acquire_launch",
        "adopt",
        "begin_save",
        "close_launch",
        "close_reader",
        "commit",
        "drop_replicas",
        "ensure_run",
        "ensure_tier",
        "forget_posts",
        "forget_tier",
        "join_launch",
        "mark_durable",
        "mark_replicated",
        "mark_swept",
        "moved_to",
        "note",
        "note_replicas",
        "open_reader",
        "pin",
        "post",
        "quarantine",
        "renew_lease",
        "report_progress",
        "report_rank",
        "report_ranks",
        "restore",
        "retire",
        "set_proven",
        "set_retention_hold",
        "set_restored_from",
        "skip_save",
        "tag",
        "unpin",
        "untag",
    }
)
"""Names of the methods that change what the catalog says: the candidates for crash points."""


def unreachable() -> CatalogError:
    """What a catalog raises that did not answer: whether the call took effect is unknown, and it may be repeated."""
    return CatalogError("the catalog did not answer; try again later", transient=True)


class FaultyCatalog(FaultyCalls):
    """A ``Catalog`` around ``inner``. ``Call.key`` is the first argument: a run's name, a launch's or generation's id.

    ``close`` is neither counted nor broken: it changes nothing that is stored.
    """

    def __init__(self, inner: Catalog, *faults: Fault) -> None:
        super().__init__(*faults)
        self._inner: Final = inner

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)
        if name == "close" or not callable(method):
            return method

        def call(*arguments: Any, **named: Any) -> Any:
            return self._call(name, method, arguments, named)

        return call

    def _call(self, name: str, method: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        subject = str(arguments[0]) if arguments and isinstance(arguments[0], str | int) else ""
        with self._whole(name, subject):
            return method(*arguments, **named)
