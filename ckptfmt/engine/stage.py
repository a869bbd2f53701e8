"""What lies on a stage: whose it is, how much it is, and freeing it (spec/tiers.md, "Cleaning").

Nothing here is needed by anybody but for speed and for finishing what a killed launch left: the durable tier alone
decides. So all of it can be lost at any time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ckptfmt.engine.survey import survey
from ckptfmt.engine.tiers import Tier
from ckptfmt.errors import BackendError, Conflict, NotFound
from ckptfmt.format import layout

log = logging.getLogger("ckptfmt")


@dataclass(frozen=True)
class Held:
    """The objects of one generation on a stage."""

    run_key: str
    key: str
    names: Mapping[str, int] = field(default_factory=dict)
    """Object name -> bytes."""

    @property
    def nbytes(self) -> int:
        return sum(self.names.values())


def held(stage: Tier) -> list[Held]:
    """Every generation of which the stage has something. One listing."""
    return [Held(run.run_key, key, names) for run in survey(stage.backend) for key, names in run.folders.items()]


def free(stage: Tier, run_key: str, key: str, names: Iterable[str]) -> None:
    """Remove objects of a generation from the stage. What cannot be removed is told, and stays."""
    folder = layout.generation_folder(run_key, key)
    try:
        for name in names:
            stage.backend.delete(f"{folder}/{name}")
        stage.backend.remove_folder(folder)
    except (BackendError, Conflict, NotFound) as error:
        log.warning("%s: objects in %s stay: %s", stage.name, folder, error)
