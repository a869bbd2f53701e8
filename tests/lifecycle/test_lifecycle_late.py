"""Objects that ranks have acknowledged and that a shared place does not show: late, or lost."""

from __future__ import annotations

import pytest
from lifecycle_rig import Place, assert_state, state_of

from ckptfmt.engine.save import waiting
from ckptfmt.errors import NotFound, SaveFailed
from ckptfmt.testing.faults import Call, Fault


def unseen(times: int | None, suffix: str) -> Fault:
    """The first looks at an object do not find it."""
    op = "read" if suffix == ".json" else "head"
    return Fault(op, error=lambda: NotFound("not here"), when=lambda call: ended(call, suffix), times=times)


def ended(call: Call, suffix: str) -> bool:
    return call.key.endswith(suffix) and ("part" in call.key or suffix != ".json")


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
def test_what_a_rank_has_acknowledged_is_looked_for_again(place: Place, suffix: str) -> None:
    process = place.open(unseen(2, suffix))
    with process.checkpointer() as checkpointer:
        pending = checkpointer.save(state_of(1), step=1)
        assert pending is not None
        assert_state(pending.result().load(), 1)


def test_what_stays_out_of_sight_fails_the_save(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_LATE_SECONDS", 0.3)
    process = place.open(unseen(None, ".json"))
    with process.checkpointer() as checkpointer:
        pending = checkpointer.save(state_of(1), step=1)
        assert pending is not None
        with pytest.raises(SaveFailed, match="not here"):
            pending.result()
        assert (process.row().abort_stage, process.row().commit_seq) == ("merge", None)
