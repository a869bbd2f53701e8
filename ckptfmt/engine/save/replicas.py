"""The digests of large replicas that another rank writes, taken while training is blocked, so that they need no memory.

To hash what lies in host memory, where it lies, reads each byte once; to freeze it for later reads and writes it. What
lies elsewhere passes through two halves of a small window: while one is hashed, the other one is filled.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final, NamedTuple

from ckptfmt.engine import plan as plans
from ckptfmt.engine.numpy_family import memory_at
from ckptfmt.engine.save.freeze import FrozenLeaf
from ckptfmt.engine.transfer import run_all, thread_count
from ckptfmt.engine.units import align_up
from ckptfmt.format import checksum
from ckptfmt.ports.arrays import ArrayFamily, Capture, LeafSpec, wait_all

HASHED_BYTES_MIN: Final = 64 << 10
"""Smaller ones are frozen like all else, and hashed in the background: a copy costs less than a call."""
_BATCH_BYTES: Final = 16 << 20
"""What one thread hashes at a time: some half a millisecond, so that threads end together, and handing it out costs
nothing beside it."""

Digests = dict[int, list[bytes]]


class _Span(NamedTuple):
    """One chunk of a leaf: ``inner`` is its first byte in the leaf."""

    leaf: int
    number: int
    inner: int
    nbytes: int


class _Filling(NamedTuple):
    """Spans on their way into a half of the window, one behind the other."""

    captures: list[Capture]
    spans: list[_Span]
    half: memoryview


def comparison_of(leaves: Sequence[tuple[str, LeafSpec]], roles: plans.Roles) -> plans.Comparison:
    """Which claims are hashed when the snapshot is taken, and the memory in bytes through which they pass."""
    chosen = frozenset([leaf for leaf in roles.claims if leaves[leaf][1].nbytes >= HASHED_BYTES_MIN])
    specs = [leaves[leaf][1] for leaf in chosen]
    if all(spec.address is not None for spec in specs):
        return plans.Comparison(hashed=chosen)
    half = min(plans.HASH_WINDOW_BYTES // 2, align_up(sum(spec.nbytes for spec in specs)))
    return plans.Comparison(hashed=chosen, window_bytes=2 * half)


def take_digests(leaves: Sequence[FrozenLeaf], chosen: Collection[int], window: memoryview) -> Digests:
    """Return the digests of the chunks of the ``chosen`` leaves; ``window`` is as large as ``comparison_of`` says.

    Raises what a device raised, once it no longer writes to the window.
    """
    digests: Digests = {}
    here: list[tuple[_Span, int]] = []
    elsewhere: list[_Span] = []
    for leaf in sorted(chosen):
        spec = leaves[leaf].spec
        spans = checksum.chunk_spans(spec.nbytes, checksum.CHUNK_BYTES)
        digests[leaf] = [b""] * len(spans)
        for number, (inner, nbytes) in enumerate(spans):
            span = _Span(leaf, number, inner, nbytes)
            if spec.address is None:
                elsewhere.append(span)
            else:
                here.append((span, spec.address + inner))
    if elsewhere:
        _pass(leaves, elsewhere, window, lambda filling: _hash(_laid_out(filling), digests))
    _hash([(span, memory_at(address, span.nbytes)) for span, address in here], digests)
    return digests


def _pass(
    leaves: Sequence[FrozenLeaf], spans: Sequence[_Span], window: memoryview, use: Callable[[_Filling], None]
) -> None:
    half = window.nbytes // 2
    filled: _Filling | None = None
    begun: list[Capture] = []
    try:
        for number, batch in enumerate(_batches(spans, half)):
            filling = _Filling([], batch, window[number % 2 * half :][:half])
            _fill(leaves, filling, begun)
            if filled is not None:
                use(filled)
            for capture in filling.captures:
                capture.wait()
            filled = filling
        if filled is not None:
            use(filled)
    except BaseException as error:
        wait_all([capture.wait for capture in begun], error)


def _batches(spans: Sequence[_Span], nbytes: int) -> Iterator[list[_Span]]:
    batch: list[_Span] = []
    room = nbytes
    for span in spans:
        if span.nbytes > room:
            yield batch
            batch, room = [], nbytes
        batch.append(span)
        room -= span.nbytes
    yield batch


def _fill(leaves: Sequence[FrozenLeaf], filling: _Filling, begun: list[Capture]) -> None:
    """Have the families copy the spans. What is under way is in ``begun`` even when this raises."""
    gathered: dict[int, tuple[ArrayFamily, list[tuple[Any, memoryview]]]] = {}
    for span, memory in _laid_out(filling):
        leaf = leaves[span.leaf]
        whole = span.nbytes == leaf.spec.nbytes
        value = leaf.value if whole else leaf.family.piece(leaf.value, span.inner, span.inner + span.nbytes)
        gathered.setdefault(id(leaf.family), (leaf.family, []))[1].append((value, memory))
    for family, pairs in gathered.values():
        capture = family.capture(pairs)
        begun.append(capture)
        filling.captures.append(capture)


def _laid_out(filling: _Filling) -> list[tuple[_Span, memoryview]]:
    found = []
    at = 0
    for span in filling.spans:
        found.append((span, filling.half[at : at + span.nbytes]))
        at += span.nbytes
    return found


def _hash(spans: Sequence[tuple[_Span, memoryview]], digests: Digests) -> None:
    batches: list[list[tuple[_Span, memoryview]]] = []
    room = 0
    for span, memory in spans:
        if room <= 0:
            batches.append([])
            room = _BATCH_BYTES
        batches[-1].append((span, memory))
        room -= span.nbytes

    def work(batch: Sequence[tuple[_Span, memoryview]]) -> None:
        for span, memory in batch:
            digests[span.leaf][span.number] = checksum.digest(memory)

    run_all([lambda batch=batch: work(batch) for batch in batches], threads=thread_count(), name="ckptfmt-hash")  # type: ignore[misc]
