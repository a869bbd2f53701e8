"""Random states that are set later than all else, as frameworks need it."""

from __future__ import annotations

from typing import Any

from ckptfmt.leaves import PerRank
from ckptfmt.rng import Rng


class LateRng:
    """This rank's generators: read at each save; what a restore brought is set by ``apply``.

    A framework draws numbers between its restore and the first step (for an iterator of data, say) that were not
    drawn where the job was never stopped.
    """

    def __init__(self) -> None:
        self._rng = Rng()
        self._saved: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"state": PerRank(self._rng.state())}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        value = saved["state"]
        self._saved = value.value if isinstance(value, PerRank) else value
        self._rng.check(self._saved)

    def apply(self) -> None:
        """Set the generators once, if a restore brought something. ``Mismatch`` as of ``Rng.restore``."""
        saved, self._saved = self._saved, None
        if saved is not None:
            self._rng.restore(saved)
