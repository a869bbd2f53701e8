"""Copying packs from one tier to another: every chunk is compared with its digest on the way, several packs at once."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import Final

from ckptfmt.engine.arena import map_memory
from ckptfmt.engine.limiter import Limiter
from ckptfmt.engine.packs import PackToCopy, Span
from ckptfmt.engine.priority import give_way
from ckptfmt.engine.read import check_chunk, read_header
from ckptfmt.engine.rereading import read_whole
from ckptfmt.engine.transfer import run_all, run_apart
from ckptfmt.engine.units import align_up
from ckptfmt.errors import AccessDenied, BackendError, Conflict, Corrupt, NotFound, OutOfSpace
from ckptfmt.ports.backend import Backend, ObjectWriter

log = logging.getLogger("ckptfmt")

ATTEMPTS: Final = 4
"""How often one pack is copied; an object is dead after any error."""
PACKS_AT_ONCE: Final = 3
THREADS: Final = 4
"""Of each pack. They wait for one place or the other most of the time."""
_PAUSE_SECONDS: Final = 0.2
_NAMES_MAX: Final = 64
"""More names than this are not taken by dead attempts: somebody else is at work."""


def _nothing(*_: object) -> None:
    """Nobody asks."""


@dataclass(frozen=True)
class Pace:
    """What a copy asks and tells on its way; all of it from the threads that copy."""

    limiter: Limiter | None = None
    give_up: Callable[[], None] = _nothing
    """Raises to end the copy."""
    copied: Callable[[int], None] = _nothing
    """Told the bytes of each part of a pack that was handed on; less than 0 where that was for nothing."""
    passing: Callable[[BackendError], None] = _nothing
    """Told each error after which a pack is copied again."""
    begins: Callable[[str], object] = _nothing
    """Told the name of each object that is begun."""


Names = Callable[[int, int], str]
"""(position of the pack, number of the attempt) -> name of the object to make."""


@dataclass(frozen=True)
class Source:
    """A place to copy from. ``names`` are those of objects that are called otherwise there than in the list."""

    backend: Backend
    names: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Copying:
    """Copies packs of one generation from the first of ``sources`` that holds good bytes into ``target``.

    All objects lie in ``folder``, on each tier.
    """

    sources: Sequence[Source]
    target: Backend
    folder: str
    pace: Pace = field(default_factory=Pace)
    replaces: bool = False
    """Whether a dead object of a wanted name is removed: where names are given, and nothing refers to it yet."""

    def __post_init__(self) -> None:
        self._windows = _Windows()

    def copy(self, packs: Sequence[PackToCopy], names: Names) -> list[str]:
        """Copy all packs, on threads of low priority; returns the names of the objects made, or found whole.

        ``Corrupt`` or ``NotFound`` if no source has good bytes; ``BackendError`` of the target.
        """
        made: dict[int, str] = {}

        def copy_one(position: int, pack: PackToCopy) -> None:
            made[position] = self._copied(pack, lambda attempt: names(position, attempt))

        run_apart(
            [lambda at=at, pack=pack: copy_one(at, pack) for at, pack in enumerate(packs)],  # type: ignore[misc]
            threads=PACKS_AT_ONCE,
            name="ckptfmt-replicate",
            begin=give_way,
        )
        return [made[position] for position in range(len(packs))]

    def holds(self, pack: PackToCopy, name: str) -> bool:
        """Whether the target has the pack under ``name``, byte for byte."""
        key = f"{self.folder}/{name}"
        try:
            if self.target.head(key).nbytes != pack.row.nbytes:
                return False
            self._read_through(self.target, key, pack, _nothing)
        except NotFound:
            return False
        except _Unreadable as unreadable:
            if isinstance(unreadable.error, BackendError):
                raise unreadable.error from None
            return False
        return True

    # -- one pack -------------------------------------------------------------------------------
    def _copied(self, pack: PackToCopy, name_of: Callable[[int], str]) -> str:
        failures = 0
        for number in count():
            self.pace.give_up()
            name = name_of(number)
            try:
                self._copy_as(pack, name)
            except _Taken as taken:
                if self.holds(pack, name):
                    self.target.sync(f"{self.folder}/{name}")
                    self.pace.copied(pack.row.nbytes)
                    return name
                if number >= _NAMES_MAX:
                    raise taken.error from None
                self._remove_dead(name)
            except BackendError as error:
                failures += 1
                if failures == ATTEMPTS or isinstance(error, OutOfSpace | AccessDenied) or not error.transient:
                    raise
                log.warning("%s; copying the pack again", error)
                self.pace.passing(error)
                time.sleep(_PAUSE_SECONDS * failures)
            else:
                return name
        raise AssertionError("counting has ended")

    def _remove_dead(self, name: str) -> None:
        if self.replaces:
            self.target.delete(f"{self.folder}/{name}")

    def _copy_as(self, pack: PackToCopy, name: str) -> None:
        """Into a new object. An error of a source leads to the next one, and counts as no attempt."""
        first: Exception | None = None
        for source in self.sources:
            try:
                self._copy_from(source, pack, name)
            except _Unreadable as unreadable:
                told = unreadable.error
                log.warning("pack %s/%s cannot be copied from %s: %s", self.folder, name, source.backend.url, told)
                first = first or told
            else:
                return
        raise first or NotFound(f"pack {self.folder}/{pack.row.name}: there is no tier to copy it from")

    def _copy_from(self, source: Source, pack: PackToCopy, name: str) -> None:
        key, there = f"{self.folder}/{name}", source.names.get(pack.row.name, pack.row.name)
        self.pace.begins(name)
        with _taking():
            writer = self.target.open_writer(key, pack.row.nbytes)
        copied: list[int] = []
        try:

            def hand_on(span: Span, image: memoryview) -> None:
                writer.write_at(span.start, image)
                copied.append(len(image))
                self.pace.copied(len(image))

            self._read_through(source.backend, f"{self.folder}/{there}", pack, hand_on)
            self.pace.give_up()
            with _taking():
                writer.finish()
        except BaseException:
            self.pace.copied(-sum(copied))
            _abort(writer, f"{self.target.url}/{key}")
            raise

    def _read_through(
        self, backend: Backend, key: str, pack: PackToCopy, hand_on: Callable[[Span, memoryview], None]
    ) -> None:
        """Read a pack and compare all of it; each span is handed on once it has been compared."""
        with _reading():
            header = memoryview(read_header(backend, key, pack.row))
        seams = _Seams()

        def take(span: Span) -> None:
            self.pace.give_up()
            if self.pace.limiter is not None:
                self.pace.limiter.take(span.stop - span.start, self.pace.give_up)
            stop = min(align_up(span.end), pack.row.nbytes)  # whole pages take the fast path
            with self._windows.lend(stop - span.start) as window:
                with _reading():
                    read_whole(lambda: _read_span(backend, key, span, window, header))
                    seams.note(span, window)
                hand_on(span, window[: span.stop - span.start])

        run_all(
            [lambda span=span: take(span) for span in pack.spans],  # type: ignore[misc]
            threads=THREADS,
            name="ckptfmt-replicate-part",
        )
        with _reading():
            seams.check(pack.spans, key)


class _Unreadable(Exception):
    """The source's fault, not the target's."""

    def __init__(self, error: NotFound | Corrupt | BackendError) -> None:
        super().__init__(str(error))
        self.error = error


class _Taken(Exception):
    """The name is another object's. Not any ``Conflict``: ``give_up`` raises some, too."""

    def __init__(self, error: Conflict) -> None:
        super().__init__(str(error))
        self.error = error


@contextmanager
def _taking() -> Iterator[None]:
    try:
        yield
    except Conflict as error:
        raise _Taken(error) from error


@contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except (NotFound, Corrupt, BackendError) as error:
        raise _Unreadable(error) from error


def _read_span(backend: Backend, key: str, span: Span, window: memoryview, header: memoryview) -> None:
    """``Corrupt`` unless it is as its digests and the header say."""
    backend.read_into(key, span.start, window)
    own = header[span.start : span.stop]
    if own != window[: len(own)]:
        raise Corrupt(f"the header of {key} was read twice, and differs", object=key, offset=span.start)
    for box, number, offset, nbytes in span.chunks:
        check_chunk(box, number, offset, window[offset - span.start : offset - span.start + nbytes])


class _Seams:
    """The few bytes between a page's start and a chunk's are compared in one span, and handed on in the next one,
    which has read them again: both have to have seen the same."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tails: dict[int, bytes] = {}
        self._heads: dict[int, bytes] = {}

    def note(self, span: Span, window: memoryview) -> None:
        tail = bytes(window[span.stop - span.start : span.end - span.start])
        head = bytes(window[: align_up(1)])
        with self._lock:
            self._tails[span.stop], self._heads[span.start] = tail, head

    def check(self, spans: Sequence[Span], key: str) -> None:
        for before, after in pairwise(spans):
            tail = self._tails[before.stop]
            if self._heads[after.start][: len(tail)] != tail:
                raise Corrupt(f"{key} was read twice at offset {after.start}, and differs", object=key)


class _Windows:
    """Memory that copies pass through, used again and again."""

    def __init__(self) -> None:
        self._idle: queue.SimpleQueue[memoryview] = queue.SimpleQueue()

    @contextmanager
    def lend(self, nbytes: int) -> Iterator[memoryview]:
        try:
            memory = self._idle.get_nowait()
        except queue.Empty:
            memory = memoryview(b"")
        if memory.nbytes < nbytes:
            memory = map_memory(align_up(nbytes))
        try:
            yield memory[:nbytes]
        finally:
            self._idle.put(memory)


def _abort(writer: ObjectWriter, what: str) -> None:
    try:
        writer.abort()
    except BackendError as error:  # the first error is the one to report; gc removes what is left
        log.warning("%s could not be removed after a failed copy: %s", what, error)
