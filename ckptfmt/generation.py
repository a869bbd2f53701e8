"""A committed generation, opened lazily: what is in it, and its bytes on demand."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

from ckptfmt.engine.keep.verify import verify
from ckptfmt.engine.load.load import Framework, load_state
from ckptfmt.engine.load.names import Rename
from ckptfmt.engine.load.ranks import RankMap
from ckptfmt.engine.load.readable import require_readable
from ckptfmt.engine.load.restore import RestoreOptions, restore_state
from ckptfmt.engine.load.slices import box_of, read_slice
from ckptfmt.engine.opened import Opened
from ckptfmt.engine.patterns import Patterns
from ckptfmt.engine.reports import RestoreReport, VerifyReport
from ckptfmt.engine.stored import Stored
from ckptfmt.errors import InvalidInput, Mismatch
from ckptfmt.format.naming import ranks_shown
from ckptfmt.rank_here import rank_here

if TYPE_CHECKING:
    from tensorstore import TensorStore
    from zarr import Group

    from ckptfmt.engine.arena import Arena
    from ckptfmt.engine.families import Families
    from ckptfmt.views.zarr_store import GenerationStore

    Guard = Callable[[Opened], AbstractContextManager[None]]


_T = TypeVar("_T")


class Generation(Mapping[str, "StoredTensor"]):
    """A committed generation. As a mapping: tensor name -> ``StoredTensor``; tied names are all there, and so are those
    of which several ranks kept their own."""

    def __init__(
        self,
        opened: Opened,
        *,
        families_for: Callable[..., Families],
        live_families: Callable[[], Families],
        guard: Guard,
    ) -> None:
        self._opened = opened
        self._families_for = families_for
        self._live_families = live_families
        self._guard = guard

    @property
    def id(self) -> int:
        """The handle that the catalog gave it."""
        return self._opened.info.id

    @property
    def key(self) -> str:
        """Its identity: 32 hex digits, never reused."""
        return self._opened.info.key

    @property
    def url(self) -> str:
        """URL of its folder."""
        root, folder = self._opened.site.backend.url, self._opened.folder
        return f"{root.rstrip('/')}/{folder}" if folder else root

    @property
    def run(self) -> str:
        return self._opened.info.run

    @property
    def step(self) -> int:
        return self._opened.info.step

    @property
    def parent_key(self) -> str | None:
        """Key of the generation that it continued, or None for a first one."""
        return self._opened.info.parent_key

    @property
    def world_size(self) -> int:
        return len(self._opened.manifest.ranks)

    @property
    def nbytes(self) -> int:
        """Bytes of all stored tensors, tied ones once."""
        return self._opened.manifest.nbytes

    @property
    def metadata(self) -> Any:
        """What the saver passed as ``metadata``."""
        self._live_families()  # a library that is loaded here has its value types known
        return self._opened.metadata()

    @property
    def tags(self) -> tuple[str, ...]:
        """Its tags when it was opened; empty when read without a catalog."""
        return self._opened.info.tags

    def load(
        self,
        *,
        subtree: str | None = None,
        keys: Patterns | None = None,
        exclude: Patterns | None = None,
        device: Any | None = None,
        framework: Framework = "saved",
        verify: bool = True,
        rank: int | None = None,
    ) -> Any:
        """Build the saved state, or a part of it, anew; see ``ckptfmt.load``."""
        self._live_families()
        with self._guard(self._opened):
            return load_state(
                self._opened,
                self._families_for,
                subtree=subtree,
                keys=keys,
                exclude=exclude,
                device=device,
                framework=framework,
                verify=verify,
                rank=rank,
            )

    def restore(
        self,
        into: Any,
        *,
        strict: bool = True,
        cast: bool = False,
        keys: Patterns | None = None,
        rename: Rename | None = None,
        atomic: bool = True,
        map: RankMap | None = None,
    ) -> RestoreReport:
        """Fill a live state in place; see ``ckptfmt.restore``."""
        rank, world_size = rank_here()
        options = RestoreOptions(
            strict=strict,
            cast=cast,
            keys=keys,
            rename=rename,
            atomic=atomic,
            rank=rank,
            world_size=world_size,
            map=map,
        )
        return self.restore_with(into, options)

    def restore_with(self, into: Any, options: RestoreOptions, *, arena: Arena | None = None) -> RestoreReport:
        """``restore`` with all options, for a checkpointer that lends its arena."""
        with self._guard(self._opened):
            return restore_state(self._opened, into, self._live_families(), options, arena=arena)

    def verify(self, progress: Callable[[int, int], None] | None = None) -> VerifyReport:
        """Read every byte and compare it with its digest; ``progress(done, total)`` gets bytes, from threads."""
        with self._guard(self._opened):
            return verify(self._opened, progress)

    def require_readable(self) -> None:
        """Read every byte from where it is whole, and keep none: ``Corrupt`` or ``NotFound`` if some is nowhere."""
        with self._guard(self._opened):
            require_readable(self._opened)

    # -- for other tools: made by the rooms above, when they are asked for ------------------------
    def zarr(self, *, mmap: bool = False, verify: bool = True) -> GenerationStore:
        """Its tensors as a read-only Zarr v3 store, one array each. ``InvalidInput`` without ``ckptfmt[zarr]``.

        Chunks are compared with their digests when they are read, from the nearest tier that has them. With ``mmap``
        packs on a local file system (of any tier) are shown without a copy, and compared when they are first looked at:
        what the system reads again later is not. A page that does not come (a failing disk) then ends the process, so
        this is no default.
        """
        from ckptfmt.views.opening import Reading
        from ckptfmt.views.zarr import open_store

        return open_store(self._opened, self._guard(self._opened), Reading(mmap, verify))

    def zarr_group(self, *, mmap: bool = False, verify: bool = True) -> Group:
        """The same, opened: a mapping of names to ``zarr.Array``."""
        from ckptfmt.views.opening import Reading
        from ckptfmt.views.zarr import open_group

        return open_group(self._opened, self._guard(self._opened), Reading(mmap, verify))

    def tensorstore(
        self, name: str, *, rank: int | None = None, mmap: bool = False, verify: bool = True
    ) -> TensorStore:
        """One tensor as a read-only ``tensorstore.TensorStore``; what several ranks kept for themselves by ``rank``.

        Read and compared as by ``zarr``: what TensorStore reads raises the errors of ckptfmt. ``KeyError`` without such
        a tensor, ``InvalidInput`` without ``ckptfmt[tensorstore]``.
        """
        from ckptfmt.views.opening import Reading
        from ckptfmt.views.tensorstore import open_tensorstore

        tensor = self[name] if rank is None else self[name].of_rank(rank)
        entry = tensor._one_of(tensor._entries, "value")
        return open_tensorstore(self._opened, entry, self._guard(self._opened), Reading(mmap, verify))

    def _repr_html_(self) -> str:
        from ckptfmt.views.notebook import html_of

        return html_of(self._opened)

    # -- Mapping --------------------------------------------------------------------------------
    def __getitem__(self, name: str) -> StoredTensor:
        if not isinstance(name, str) or name not in self._opened.index:
            raise KeyError(f"{self._opened.name} has no tensor {name!r}; it has {len(self)} names")
        return StoredTensor(name, self._opened.stored.every(name), self)

    def __iter__(self) -> Iterator[str]:
        yield from self._opened.index
        yield from self._opened.manifest.aliases

    def __len__(self) -> int:
        return len(self._opened.index) + len(self._opened.manifest.aliases)

    def __contains__(self, name: object) -> bool:
        return name in self._opened.index

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Generation) and other.key == self.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return (
            f"<Generation #{self.id} of run {self.run!r}, step {self.step}, {len(self)} tensors, {self.nbytes} bytes>"
        )


class StoredTensor:
    """One tensor of a committed generation. Nothing is read until ``read``, an index or ``__array__`` asks for it.

    Where several ranks kept their own under its name (``PerRank``), ``of_rank`` gives that of one; all together have
    ``nbytes``, and ``shape`` and ``dtype`` where those are equal. Whatever has no one answer is a ``Mismatch`` that
    names the ranks.
    """

    def __init__(self, name: str, entries: Sequence[Stored], generation: Generation) -> None:
        self.name = name
        self._entries = entries
        self._generation = generation

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that kept their own, ascending; empty for one tensor of all ranks."""
        return tuple(sorted(entry.rank for entry in self._entries if entry.rank >= 0))

    def of_rank(self, rank: int) -> StoredTensor:
        """The tensor as ``rank`` has it: its own, or the one of all ranks. ``InvalidInput`` if it kept none."""
        found = [entry for entry in self._entries if entry.rank in (rank, -1)]
        if not found or isinstance(rank, bool):
            raise InvalidInput(f"tensor {self.name!r} was kept by {ranks_shown(self.ranks)}, not by {rank!r}")
        return StoredTensor(self.name, found, self._generation)

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return self._one_of({entry.shape for entry in self._entries}, "shape")

    @property
    def dtype(self) -> str:
        """The element type's name, as torch writes it: ``"bfloat16"``."""
        return self._one_of({entry.dtype for entry in self._entries}, "dtype")

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self._entries)

    def read(self, *, device: Any | None = None, framework: Framework = "saved", verify: bool = True) -> Any:
        """The whole tensor. ``framework="saved"`` is torch for what was a torch tensor, if torch is installed, else
        numpy."""
        return self._read((), device, framework, verify)

    def __getitem__(self, index: Any) -> Any:
        """Read a slice: integers, slices with step 1, and ``...``. Only the chunks it lies in are read."""
        return self._read(index if isinstance(index, tuple) else (index,), None, "saved", True)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        if copy is False:
            raise ValueError(f"tensor {self.name!r} lies on storage: an array of it is always a copy")
        array = self._read((), None, "numpy", True)
        return array if dtype is None else array.astype(dtype, copy=False)

    def __iter__(self) -> Iterator[Any]:
        """Over the first dimension; the tensor is read once."""
        if not self.shape:
            raise TypeError(f"tensor {self.name!r} has no dimensions, so it cannot be iterated over")
        return iter(self.read())

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"tensor {self.name!r} has no dimensions, hence no length")
        return self.shape[0]

    def _read(self, index: tuple[Any, ...], device: Any | None, framework: Framework, verify: bool) -> Any:
        entry = self._one_of(self._entries, "value")
        start, size, drop = box_of(self.name, entry.shape, index)
        generation = self._generation
        saved_as = generation._opened.saved_as(entry.name)
        families = generation._families_for(framework, saved_torch=saved_as == "tensor")
        family = families.named({"torch": "tensor", "numpy": "array", "saved": saved_as}[framework])
        if family is None:  # a torch tensor where torch is not installed
            family = families.named("array")
        if family is None:
            raise InvalidInput("no array library is there to build a tensor")
        with generation._guard(generation._opened):
            value = read_slice(generation._opened, entry, start, size, family, device=device, verify=verify)
        return value[tuple(0 if axis in drop else slice(None) for axis in range(len(size)))] if drop else value

    def _one_of(self, found: Collection[_T], what: str) -> _T:
        if len(found) > 1:
            raise Mismatch(
                f"tensor {self.name!r} of {self._generation._opened.name} has no one {what}: {ranks_shown(self.ranks)} "
                "kept it, each for itself; of_rank(...) is that of one",
                kind="rank_not_chosen",
            )
        return next(iter(found))

    def __repr__(self) -> str:
        kinds = {f"{entry.dtype} {list(entry.shape)}" for entry in self._entries}
        own = f", kept by {ranks_shown(self.ranks)}" if self.ranks else ""
        return f"<StoredTensor {self.name!r} {' or '.join(sorted(kinds))}{own}>"
