"""DCP's storage reader: any committed generation, whoever saved it."""

from __future__ import annotations

import io
import os
import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ckptfmt import connect, reading
from ckptfmt.engine.collector import held_back
from ckptfmt.engine.load.build import Builder, read_entries, wanted_entries
from ckptfmt.engine.load.decisions import Fill
from ckptfmt.engine.load.filling import Filling
from ckptfmt.engine.load.window import fill_through_window
from ckptfmt.engine.opened import Opened
from ckptfmt.errors import CkptError, InvalidInput, Mismatch
from ckptfmt.reference import At, Reference, merge, parse_reference
from ckptfmt.torch.dcp.contents import Contents, contents_of
from ckptfmt.torch.dcp.state import MemoryFile, PlannerBytes, Whole
from ckptfmt.torch.elements import NAMES


class GenerationReader(StorageReader):
    """Loads a committed generation through ``dcp.load``, in whatever layout the state has now.

    ``place`` is a path, a URL, or a reference ``<repository>#<run>[@<id>|@step:N|@tag:T]``; without ``at`` it is the
    latest committed generation when a load begins. All ranks must find the same one: if not, the load fails on all of
    them, naming the generations. Every byte is compared with its digest before a tensor is changed; with
    ``atomic=False`` tensors are filled one after the other, and no second copy of the state is needed. Of what each
    rank kept for itself (``PerRank``) comes that of the saved rank ``rank``; None leaves it out where several did.

    Loading raises DCP's ``CheckpointException``, with the ``NotFound``, ``Corrupt`` or ``Mismatch`` of each rank.
    """

    def __init__(
        self,
        place: str | os.PathLike[str],
        *,
        run: str | None = None,
        at: At = None,
        rank: int | None = None,
        atomic: bool = True,
        catalog: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._wanted = merge(parse_reference(place), run=run, at=at)
        self._rank = rank
        self._atomic = atomic
        self._catalog = catalog
        self._storage_options = storage_options
        self._connection: connect.Connection | None = None
        self._opened: Opened | None = None
        self._contents: Contents | None = None
        self.load_id = ""
        """Of the last load."""

    # -- which generation -----------------------------------------------------------------------
    def reset(self, checkpoint_id: str | os.PathLike[str] | int | None = None) -> None:
        """The next load is of that: an id (``41``, ``"41"``), ``"step:900"``, ``"tag:best"``, a reference, or the
        latest of a repository."""
        self._close()
        if checkpoint_id is None:
            return
        if isinstance(checkpoint_id, int) or (
            isinstance(checkpoint_id, str) and (checkpoint_id.isdigit() or checkpoint_id.startswith(("step:", "tag:")))
        ):
            self._wanted = replace(self._wanted, at=checkpoint_id)
        else:
            found = parse_reference(checkpoint_id)
            self._wanted = Reference(found.url, found.run or self._wanted.run, found.at)

    @property
    def checkpoint_id(self) -> str:
        """What is loaded, as a reference."""
        wanted = self._wanted
        at = "" if wanted.at is None else f"@{wanted.at}"
        return f"{wanted.url}#{wanted.run}{at}" if wanted.run is not None else wanted.url

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a reference with a run: a plain path may be a folder of DCP's own."""
        try:
            return parse_reference(checkpoint_id).run is not None
        except InvalidInput:
            return False

    # -- one load, in the order in which DCP calls -----------------------------------------------
    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        # Not called "kwargs": DCP would take that for an offer of metadata by rank, and ask again after an error.
        self._close()
        wanted = self._wanted
        self._connection = connect.open_site(
            wanted.url, mode="r", catalog=self._catalog, storage_options=self._storage_options
        )
        try:
            with held_back():
                self._opened = reading.find_opened(self._connection, wanted.run, wanted.at)
                self._contents = contents_of(self._opened, self._rank)
                metadata = self._contents.metadata()
        except BaseException:
            self._close()
            raise
        self.load_id = uuid.uuid4().hex
        metadata.storage_meta = StorageMeta(self.checkpoint_id, save_id=self._opened.info.key, load_id=self.load_id)
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_args: Any, **_kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return replace(plan, storage_data=self._found()[0].info.id)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """All ranks load one generation. ``Mismatch`` names those that they found."""
        found = {plan.storage_data for plan in plans if plan.storage_data is not None}
        if len(found) > 1:
            each = [f"rank {rank}: generation {plan.storage_data}" for rank, plan in enumerate(plans)]
            raise Mismatch(
                f"{self.checkpoint_id}: the ranks found different generations, as one was committed meanwhile; load "
                "again, or name one with at=:",
                tuple(each),
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        opened, contents = self._found()
        tensors = [item for item in plan.items if item.type is not LoadItemType.BYTE_IO]
        values = [item for item in plan.items if item.type is LoadItemType.BYTE_IO]
        with held_back():
            _read_tensors(opened, contents, tensors, planner, atomic=self._atomic)
            _read_values(opened, contents, values, planner)
        self._close()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _found(self) -> tuple[Opened, Contents]:
        if self._opened is None or self._contents is None:
            raise InvalidInput("read_metadata comes first: pass the reader to dcp.load")
        return self._opened, self._contents

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        self._opened = self._contents = None
        if connection is not None:
            connection.close()


def _read_tensors(
    opened: Opened, contents: Contents, items: list[ReadItem], planner: LoadPlanner, *, atomic: bool
) -> None:
    targets = [planner.resolve_tensor(item).detach() for item in items]
    fills = [_fill(contents, item, target) for item, target in zip(items, targets, strict=True)]
    if atomic:
        filling = Filling(fills)
        filling.fill(filling.read(opened))
    else:
        changed: list[str] = []
        try:
            fill_through_window(opened, fills, changed)
        except CkptError as error:
            if changed:
                error.add_note(f"already changed: {', '.join(changed)}")
            raise
    for item, target in zip(items, targets, strict=True):
        planner.commit_tensor(item, target)


def _fill(contents: Contents, item: ReadItem, target: torch.Tensor) -> Fill:
    name = item.storage_index.fqn
    row = contents.tensors[name]
    family = connect.live_families().of(target)
    if family is None:
        raise AssertionError("torch is imported, and its family is not there")
    chunk = item.storage_index.offset or (0,) * len(row.shape)
    start = tuple(a + b for a, b in zip(chunk, item.storage_offsets, strict=True))
    size = tuple(item.lengths)
    problem = family.check_fillable(target, name)
    if problem is None and tuple(target.shape) != size:
        problem = f"{name}: a box of {list(size)} for a tensor of {list(target.shape)}"
    cast = NAMES.get(target.dtype) != row.dtype
    if problem is None and cast:
        reason = family.check_cast(target, row.dtype)
        problem = None if reason is None else f"{name}: {reason}"
    if problem is not None:
        raise Mismatch("the generation does not fit what the planner gave; nothing was changed:", (problem,))
    return Fill(name, target, family, row, start, size, cast, family.host_address(target))


def _read_values(opened: Opened, contents: Contents, items: list[ReadItem], planner: LoadPlanner) -> None:
    if not items:
        return
    found = {item.storage_index.fqn: contents.values[item.storage_index.fqn] for item in items}
    memory = read_entries(opened, wanted_entries(contents.view, [value.node for value in found.values()]))
    builder = Builder(contents.view, connect.families_for("saved", saved_torch=True), memory)
    for item in items:
        value = found[item.storage_index.fqn]
        built = builder.value(value.node)
        planner.load_bytes(item, io.BytesIO(built) if value.mark is PlannerBytes else _as_saved(built, value.mark))


def _as_saved(value: Any, mark: type[Whole] | None) -> io.BytesIO:
    """What planners take: a value as ``torch.save`` makes it. None of it is stored, and nothing stored is unpickled."""
    file = io.BytesIO()
    torch.save(io.BytesIO(value) if mark is MemoryFile else value, file)
    file.seek(0)
    return file
