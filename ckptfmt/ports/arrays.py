"""How the engine sees tensors: one family per array library.

The engine never imports torch. numpy's family is its own; torch's is offered by ``connect`` when
``"torch" in sys.modules``. Host memory is little-endian bytes of the box in C order.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec

LeafKind = Literal["sharded", "replicated", "per_rank"]


class LeafSpec(msgspec.Struct, frozen=True, gc=False):
    """What one tensor leaf is, without its data.

    A Struct, since tens of thousands are made in the stall and a frozen dataclass costs twenty times as much.
    ``msgspec.structs.replace`` makes a changed copy (``dataclasses.replace`` refuses Structs).

    ``dtype`` is a format dtype name (``format.dtypes``); ``start`` and ``size`` give the box of
    ``global_shape`` that is held here; ``nbytes`` is the box's bytes. ``alias`` is equal for leaves
    that are views of exactly the same bytes (same address, shape, strides and dtype), else None
    when that cannot be told or the tensor has no bytes. ``flags`` are facts needed to rebuild exactly:
    ``parameter``, ``buffer``, ``non_persistent``, ``requires_grad``, ``channels_last``, ...
    ``address`` is where the box's bytes already lie in host memory, dense, in C order and
    little-endian; None if they don't, or there are none.
    ``holders`` are the global ranks that hold exactly this box, ascending, whether or not they save: of a box of a
    tensor that is spread over ranks, as its mesh tells. Empty for all else: then every rank that saves holds it if
    ``kind`` is ``replicated``, and only this one if not. What a rank outside of the mesh lists, which has no elements,
    names the ranks of the mesh.
    """

    dtype: str
    global_shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]
    nbytes: int
    kind: LeafKind = "replicated"
    alias: Hashable | None = None
    flags: tuple[str, ...] = ()
    address: int | None = None
    holders: tuple[int, ...] = ()


@dataclass(frozen=True)
class Ownership:
    """Live tensors that nothing changes but their owner (an optimizer), which announces it: a snapshot may go on
    copying them until then."""

    values: Callable[[int], Sequence[Any]]
    """All of them now but those in host memory of fewer bytes than that. Their family describes them; what has no
    ``alias`` is not recognised in the saved state."""
    announce: Callable[[Callable[[], None]], Callable[[], None]]
    """``announce(before)`` has ``before()`` called by the updating thread ahead of every change, until the returned
    undo is called: by that thread, but not from within ``before``."""
    changes: Callable[[Any], int]
    """The library's count of in-place changes of one value: different counts tell of a change, equal ones prove
    nothing."""


class Outline(msgspec.Struct, frozen=True, gc=False):
    """A stored tensor by what is known of it before a byte is read. ``name`` is how the saved state refers to it,
    ``dtype`` a format dtype name, ``shape`` the global one."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Expansion:
    """A live object turned into a nested state that the tree codec and the leaf walk understand.

    ``live``: the tensors in ``state`` are the object's own memory, so a restore fills them in place
    and then calls ``apply`` (if any) with the *non-tensor* rest. Otherwise nothing is touched until
    all bytes are read and verified, and then ``apply(saved_state)`` hands over the whole rebuilt
    state, whose tensors are fresh copies on the CPU.
    """

    kind: str
    """``module``, ``optimizer``, ``stateful`` or ``rng``."""
    type_name: str
    state: Any
    live: bool
    apply: Callable[[Any], None] | None = None
    notes: Mapping[str, Any] | None = None
    """Facts to store beside the state, e.g. ``{"stripped": ["_orig_mod"]}``."""
    check: Callable[[Any], None] | None = None
    """Called with what ``apply`` will get, before any live object is touched: raises ``Mismatch`` listing every
    difference that ``apply`` would find."""
    rename: Callable[[Any, Callable[[str], str]], Any] | None = None
    """``rename(saved_state, change)`` gives the tensor names that the state is keyed by new ones; for an optimizer,
    whose state goes by the names of its parameters."""
    owned: Ownership | None = None
    """What the object alone changes."""
    make: Callable[[Callable[[], Any]], Mapping[str, Any]] | None = None
    """``make(outline)`` gives new tensors to be filled with what was saved, by the ``name`` of their ``Outline``, for
    tensors that ``apply`` could not take whole: each rank holds only its share of them. ``outline()`` is the saved
    state with its mappings, lists and texts, an ``Outline`` for each tensor, and None for all else."""


class Capture(Protocol):
    """Copies into host memory that are under way."""

    def ready(self, index: int) -> bool:
        """Whether pair ``index`` has its final host bytes."""

    def wait_for(self, index: int) -> None:
        """Block until pair ``index`` is final. Raises what the device raised."""

    def wait(self) -> None:
        """Block until all pairs are final, and let go of the sources."""

    def fence(self) -> None:
        """Make the current device stream wait for the copies; the host does not wait."""


def wait_all(waits: Iterable[Callable[[], None]], first: BaseException | None = None) -> None:
    """Call each of ``waits`` to its end, also after one that failed: memory is free only when the last copy has ended.

    Raises the ``first`` error, if there is one: that which came before, or the first of ``waits``. What is interrupted
    is waited for again, until a second interrupt.
    """
    interrupted = False
    for wait in waits:
        waiting = True
        while waiting:
            try:
                wait()
                waiting = False
            except Exception as error:
                first = first or error
                waiting = False
            except BaseException as error:
                first = first or error
                if interrupted:
                    raise first from None
                interrupted = True
    if first is not None:
        raise first


class ArrayFamily(Protocol):
    """One array library. ``name`` is the word used in the state tree's references: ``tensor`` or ``array``."""

    name: str

    def owns(self, value: Any) -> bool:
        """Whether ``value`` is a tensor leaf of this family (subclasses that it must refuse included)."""

    def owns_object(self, value: Any) -> bool:
        """Whether ``value`` is an object that ``expand`` treats specially (nn.Module, Optimizer, ...)."""

    def expand(self, objects: Sequence[tuple[str, Any]], leaves: Sequence[tuple[str, Any]]) -> list[Expansion]:
        """Expand all owned objects of one state together, so that an optimizer can be keyed by the
        names of its parameters. ``objects`` are (dotted path, object), ``leaves`` the (dotted name, tensor)
        pairs that stand in the state by themselves. ``Mismatch`` names every parameter or name clash."""

    def describe(self, value: Any, path: str, known: LeafSpec | None = None) -> LeafSpec:
        """No data access, no device sync. ``UnsupportedValue`` naming ``path`` for sparse, quantised, nested, meta and
        wrapper tensors, and for dtypes that the format lacks.

        ``known`` was said of what stood at this place in the last save. If every word of it holds for ``value``, that
        very object may be returned: in the stall comparing is cheaper than making. Its ``kind`` is the caller's, and
        it never was a box with ``holders``."""

    def boxes(self, value: Any, path: str) -> Sequence[tuple[Any, LeafSpec]] | None:
        """What this rank holds of a tensor that is spread over ranks; None for an ordinary tensor, which ``describe``
        takes. Which of the two is told by the value's type alone.

        Each box comes as a plain local tensor, a view of ``value``'s memory, with what it is: ``global_shape``,
        ``start``, ``size`` and ``holders`` filled, ``kind`` ``replicated`` where all ranks of the tensor's mesh hold
        it whole, else ``sharded``. There is at least one: a rank that holds nothing of the tensor has one box of no
        elements, which starts at zero. No data access, no copy, no communication. ``UnsupportedValue`` naming
        ``path`` for what is still to be summed up over ranks (``Partial``) and for what ``describe`` refuses.
        """

    def coordinates(self, value: Any) -> Mapping[str, int]:
        """Where this rank stands in the mesh of a value that has ``boxes``: dimension name -> coordinate (a dimension
        without a name goes by its number). Empty for a rank outside of the mesh. In the stall once per tensor: the
        same object for all that lie on one mesh saves the caller to read it again."""

    def host_address(self, value: Any) -> int | None:
        """``address`` of what ``describe`` says, by itself."""

    def capture(self, pairs: Sequence[tuple[Any, memoryview]]) -> Capture:
        """Copy each value's box into its host memory. CPU values are final on return."""

    def piece(self, value: Any, start: int, stop: int) -> Any:
        """The bytes ``start`` to ``stop`` of the value's box in C order (multiples of its element size), as a value
        that ``capture`` takes. Takes no more memory than the piece, and none where the box lies dense."""

    def fill(self, pairs: Sequence[tuple[Any, memoryview]]) -> Capture:
        """Copy host bytes into live values, without autograd. The values may be strided, on a device, or need a dtype
        that ``cast`` describes (see ``fill_cast``)."""

    def wrote_to(self, values: Sequence[Any]) -> None:
        """The memory at ``host_address`` of each value was written to directly: tell the library what its own
        in-place operations would (torch's autograd must not use what it remembered of them)."""

    def fill_cast(self, value: Any, saved_dtype: str, host: memoryview) -> None:
        """Copy host bytes of ``saved_dtype`` into ``value`` with the library's ordinary conversion."""

    def check_cast(self, value: Any, saved_dtype: str) -> str | None:
        """A reason why ``fill_cast`` cannot convert ``saved_dtype`` to the dtype of ``value``, which is left as it is;
        or None."""

    def check_fillable(self, value: Any, path: str) -> str | None:
        """A reason why ``value`` cannot be filled (e.g. on the meta device: names ``to_empty``), or None."""

    def takes(self, value: Any, dtype: str, shape: tuple[int, ...]) -> int | None:
        """``host_address`` of a value that can be filled as it is with a whole tensor of ``dtype`` and ``shape``.
        Asked of every tensor of a state, so it must be cheap. None is no refusal: then ``check_fillable`` and
        ``describe`` tell."""

    def build(self, spec: LeafSpec, host: memoryview, flags: Sequence[str], device: Any | None) -> Any:
        """Return a value over ``host`` (writable; the value keeps it alive, without a copy where the library allows)
        or, with a device, on that device."""

    def pin(self, memory: memoryview) -> Callable[[], None]:
        """Register host memory for fast device copies; returns the undo. A no-op without a device."""
