"""Whether a launch may still write to its run. Asked under the run's lock, except where a late answer harms nothing."""

from __future__ import annotations

from ckptfmt.catalog.free_text import storable
from ckptfmt.errors import Conflict, Fenced
from ckptfmt.ports.records import LaunchRecord, RunRecord


def require_saving(run: RunRecord, launch: LaunchRecord, token: str) -> None:
    """Raise unless the launch may still begin or skip saves."""
    require_owner(run, launch)
    if launch.token != storable(token):
        # Ids and fences are handed out again once a copy of the catalog was put back; tokens never are.
        raise Fenced(
            f"launch {launch.id} of run {run.name!r} with fence {launch.fence} is another one now (host {launch.host}, "
            f"pid {launch.pid}): the catalog was put back from a copy; this process must stop saving to it"
        )
    require_open(run, launch)


def require_owner(run: RunRecord, launch: LaunchRecord) -> None:
    """``Fenced`` unless the launch is the run's newest."""
    if launch.fence != run.fence:
        raise Fenced(
            f"launch {launch.id} of run {run.name!r} has fence {launch.fence}, but a newer launch raised it to "
            f"{run.fence}: this process must stop saving to the run"
        )


def require_open(run: RunRecord, launch: LaunchRecord) -> None:
    """``Conflict`` if the launch was closed."""
    if launch.closed_at is not None:
        raise Conflict(f"launch {launch.id} of run {run.name!r} was closed: start a new launch")
