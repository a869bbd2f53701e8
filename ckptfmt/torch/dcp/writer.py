"""DCP's storage writer: its plan becomes this rank's part of a generation."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, cast

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ckptfmt.errors import InvalidInput
from ckptfmt.leaves import Sole
from ckptfmt.reference import Reference, parse_at, parse_reference
from ckptfmt.torch.dcp import planner_data
from ckptfmt.torch.dcp.seat import Launch, Place, Seat, rank_in_world, seat_of, world_size
from ckptfmt.torch.dcp.staging import Staging
from ckptfmt.torch.dcp.state import planned_state

if TYPE_CHECKING:
    from ckptfmt.generation import Generation

log = logging.getLogger("ckptfmt")

HOST_BYTES_MAX: Final = 256 << 20
_arrived: Final[dict[str, GenerationWriter]] = {}
"""Writers that came from another process, by identity: ``async_save`` in a process sends one with every save."""


class GenerationWriter(AsyncStager, StorageWriter):
    """Saves what ``dcp.save`` and ``dcp.async_save`` are given as a generation of ``run``, committed by the catalog.

    ``place`` is a path, a URL, or a reference ``<repository>#<run>[@step:N]``. All ranks make their own with the same
    arguments; which of them save together is DCP's matter (``process_group=``, ``no_dist=``). A save returns when the
    generation is committed: it is in ``generation`` then (in the process that wrote it).

    One writer serves any number of saves: they are one launch, whose lease it holds from the first save until
    ``close``, or until a save fails. Give each save its step with ``checkpoint_id``: a number, ``"step:900"`` or a
    reference. As ``async_save``'s stager (it is one unless ``async_stager=`` says otherwise) it copies the state as a
    ``Checkpointer`` does, into memory that is used again. ``host_bytes_max`` (bytes) bounds what it takes beside that;
    None: the state once more, for writing a pack again after an error of the storage.

    ``InvalidInput`` for ``use_collectives=False``: it would make one checkpoint per rank, which nobody could commit.
    """

    _synchronize_after_execute = False

    def __init__(
        self,
        place: str | os.PathLike[str],
        *,
        run: str | None = None,
        step: int | None = None,
        metadata: Any = None,
        tags: Sequence[str] = (),
        catalog: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        commit_timeout: float = 600.0,
        host_bytes_max: int | None = HOST_BYTES_MAX,
    ) -> None:
        super().__init__()
        self._identity = uuid.uuid4().hex
        self._place = Place("", "default", catalog, storage_options, commit_timeout, host_bytes_max)
        self.step = 0
        self.metadata = metadata
        self.tags = tuple(tags)
        self.generation: Generation | None = None
        """What the last save of this process committed."""
        self.save_id: str | None = None
        """Its key."""
        self._go_to(parse_reference(place))
        if run is not None:
            self._place = replace(self._place, run=run)
        if step is not None:
            self.step = step
        self._launch: Launch | None = None
        self._under_way = False
        self._planner_data: Any = None
        """What the planner left, if it is kept in the save that is under way."""
        self._staging = Staging()

    # -- which generation -----------------------------------------------------------------------
    def reset(self, checkpoint_id: str | os.PathLike[str] | int | None = None) -> None:
        """The next save goes there: a step (``900``, ``"900"``, ``"step:900"``), a reference, or a repository."""
        if checkpoint_id is None:
            return
        before = self._place
        text = str(checkpoint_id) if isinstance(checkpoint_id, int) else checkpoint_id
        if isinstance(text, str) and (text.isdigit() or text.startswith("step:")):
            self.step = _step_of(text if text.startswith("step:") else f"step:{text}")
        else:
            self._go_to(parse_reference(text))
        if self._place != before:
            self._end_launch()

    def _go_to(self, reference: Reference) -> None:
        self._place = replace(self._place, url=os.fspath(reference.url), run=reference.run or self._place.run)
        if reference.at is not None:
            self.step = _step_of(reference.at)

    @property
    def checkpoint_id(self) -> str:
        """A reference to the generation that a save makes."""
        return f"{self._place.url}#{self._place.run}@step:{self.step}"

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a reference with a run: a plain path may be a folder of DCP's own."""
        try:
            return parse_reference(checkpoint_id).run is not None
        except InvalidInput:
            return False

    # -- one save, in the order in which DCP calls -----------------------------------------------
    def storage_meta(self) -> StorageMeta:
        # The first call of a save, on every rank, whatever else fails there.
        if self._under_way:
            self._end_launch()
        self._under_way = True
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("use_collectives") is False:
            raise InvalidInput(
                "use_collectives=False would make one checkpoint per rank: a generation is committed when all ranks "
                "have written theirs; leave it out, or save a state of one rank with no_dist=True"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return replace(plan, storage_data=rank_in_world())

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        seat = seat_of([plan.storage_data for plan in plans])
        return plans if seat is None else [replace(plan, storage_data=seat) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        seat = plan.storage_data if isinstance(plan.storage_data, Seat) else seat_of(range(world_size()))
        if seat is None:
            raise AssertionError("a seat for every rank of the world")
        if self._launch is not None and self._launch.ranks != seat.ranks:
            self._end_launch()
        if self._launch is None:
            self._launch = Launch(self._place, seat)
        alone = len(seat.ranks) == 1
        state: Any = Sole(lambda: planned_state(plan, planner, alone=False))
        if alone:
            state = planned_state(plan, planner, alone=True)
        metadata = self._with_planner_data(planner, seat)
        self.generation = self._launch.save(state, step=self.step, metadata=metadata, tags=self.tags)
        self.save_id = self.generation.key
        self._under_way = False
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(item.index, item.tensor_storage_size() or 0, None) for item in plan.items])
        return done

    def _with_planner_data(self, planner: SavePlanner, seat: Seat) -> Any:
        """The generation's metadata, which is that of the lowest rank."""
        self._planner_data = None
        left = planner_data.left_by(planner) if rank_in_world() == min(seat.ranks) else None
        both = None if left is None else planner_data.beside(self.metadata, left)
        if both is None:
            return self.metadata
        self._planner_data = left
        return both

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """The coordinator's last call. All that is kept of ``metadata`` is in the manifest already, and committed."""
        metadata.storage_meta = StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)
        told = metadata.planner_data
        if planner_data.of_its_own(told) and told is not self._planner_data:
            log.warning(
                "%s: what the planner left in planner_data is not kept: it is seen before the commit only in "
                "planner.metadata on the lowest rank, beside metadata= that is a mapping; set it there, in "
                "create_global_plan, instead of returning another Metadata",
                self.checkpoint_id,
            )

    # -- staging for async_save -----------------------------------------------------------------
    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy the state into host memory; on return the caller may change everything. The result is a mapping, and
        makes its tensors when it is read."""
        return cast(dict[str, Any], self._staging.stage(state_dict))

    def synchronize_staging(self) -> None:
        """Nothing is left to wait for."""

    # -- ending ---------------------------------------------------------------------------------
    def close(self) -> None:
        """Release the run's lease. A save after it begins a new launch."""
        self._end_launch()
        self._staging.drop()

    def _end_launch(self) -> None:
        launch, self._launch = self._launch, None
        if launch is not None:
            launch.close()

    def __enter__(self) -> GenerationWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (self._identity, self._place, self.step, self.metadata, self.tags)


def _arrive(identity: str, place: Place, step: int, metadata: Any, tags: tuple[str, ...]) -> GenerationWriter:
    """The writer of another process, here: the same one for each of its saves, so that they are one launch."""
    writer = _arrived.get(identity)
    if writer is None:
        writer = _arrived[identity] = GenerationWriter(place.url, run=place.run)
    if writer._place != place:
        writer._end_launch()
    writer._place, writer.step, writer.metadata, writer.tags = place, step, metadata, tags
    return writer


def _step_of(at: int | str) -> int:
    step = parse_at(at).step
    if step is None or step < 0:
        raise InvalidInput(f"{at!r}: a save makes a new generation; name its step: step:900")
    return step
