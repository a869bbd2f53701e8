"""A generation as safetensors files in the manner of Hugging Face: ``model.safetensors``, or numbered files and their
index. Tensors stream through, verified as they are read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from typing import Any, Final

import numpy as np

from ckptfmt.backends.posix_errors import translated
from ckptfmt.engine.keep.verify import Progress
from ckptfmt.engine.load.names import Selection
from ckptfmt.engine.opened import Opened
from ckptfmt.engine.patterns import Patterns
from ckptfmt.engine.reports import Report
from ckptfmt.errors import InvalidInput, NotFound
from ckptfmt.exchange.counting import Count
from ckptfmt.exchange.generation_source import tensor_of
from ckptfmt.exchange.new_files import NewFiles
from ckptfmt.exchange.pieces import SourceTensor
from ckptfmt.format.boxes import volume
from ckptfmt.format.dtypes import DTYPES, dtype, numpy_dtype
from ckptfmt.format.pack import PackEntry, layout_pack, order, split
from ckptfmt.views.box_bytes import VerifiedBytes

FILE_BYTES: Final = 5 << 30
"""Of one file, as transformers cuts them."""
INDEX: Final = "model.safetensors.index.json"
FLOATS: Final = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
"""What tensors of floating point can be converted to."""


@dataclass(frozen=True)
class Chosen:
    """What is exported: the tensors that ``keys`` and not ``exclude`` select, below ``subtree`` (whose path is taken
    off their names), floating point ones as ``dtype``; of what ranks kept for themselves that of ``rank``."""

    keys: Patterns | None = None
    exclude: Patterns | None = None
    subtree: str | None = None
    dtype: str | None = None
    rank: int | None = None


@dataclass(frozen=True)
class SafetensorsExport(Report):
    """What was written. ``tied`` are names that other names of the files stand for; ``cast`` those that were converted;
    ``as_bytes`` those whose element type safetensors has no word for, by the numbers that they consist of."""

    report: str
    url: str
    run: str
    generation_id: int
    step: int
    folder: str
    files: tuple[str, ...]
    tensors: int
    nbytes: int
    tied: Mapping[str, str]
    cast: tuple[str, ...]
    as_bytes: tuple[str, ...]


@dataclass(frozen=True)
class _Plan:
    """``entries`` say what is written of ``sources``, in the order of the files, which hold the rows in ``files``."""

    sources: list[SourceTensor]
    entries: list[PackEntry]
    files: list[list[int]]
    names: list[str]
    tied: dict[str, str]


def export_safetensors(
    opened: Opened,
    folder: Path,
    chosen: Chosen | None = None,
    *,
    file_bytes_max: int = FILE_BYTES,
    progress: Progress | None = None,
) -> SafetensorsExport:
    """Write the chosen tensors of ``opened`` to new files in ``folder``, which is made if need be.

    No file has its name before all are written and synced, and the index is the last. ``Conflict`` if one of that name
    is there, ``InvalidInput`` for what cannot be chosen or converted, ``NotFound`` if nothing is left, ``Corrupt`` for
    damage. ``progress(done, total)`` gets bytes as they are read.
    """
    chosen = chosen or Chosen()
    _check(chosen, file_bytes_max)
    plan = _planned(opened, chosen, file_bytes_max)
    folder = folder.absolute()
    several = len(plan.files) > 1
    notes = {"format": "pt", "ckptfmt.run": opened.info.run, "ckptfmt.generation": opened.info.key}
    count = Count(progress, sum(source.nbytes for source in plan.sources))
    with NewFiles(folder) as new:
        for name in (*plan.names, INDEX):
            new.require_free(name)
        for name, rows in zip(plan.names, plan.files, strict=True):
            _write_file(new.create(name), str(folder / name), plan, rows, notes, count)
        if several:
            with translated("write", str(folder / INDEX)):
                _write(new.create(INDEX), _index(plan))
        new.publish()
    return _report(opened, folder, plan, several)


def _check(chosen: Chosen, file_bytes_max: int) -> None:
    if chosen.dtype is not None and chosen.dtype not in FLOATS:
        raise InvalidInput(f"dtype={chosen.dtype!r}: tensors can be converted to {', '.join(FLOATS)}")
    if file_bytes_max < 1:
        raise InvalidInput(f"a file of {file_bytes_max} bytes holds nothing: give at least 1")


# -- what goes where --------------------------------------------------------------------------------
def _planned(opened: Opened, chosen: Chosen, file_bytes_max: int) -> _Plan:
    sources, tied = _sources(opened, chosen)
    entries = [_entry(name, tensor, chosen.dtype) for name, tensor in sources.items()]
    by_place = order(entries)
    entries = [entries[at] for at in by_place]
    tensors = list(sources.values())
    files = split(entries, file_bytes_max)
    count = len(files)
    names = ["model.safetensors"]
    if count > 1:
        names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    return _Plan([tensors[at] for at in by_place], entries, files, names, tied)


def _sources(opened: Opened, chosen: Chosen) -> tuple[dict[str, SourceTensor], dict[str, str]]:
    """Tensors by the names that they get, and tied name -> the name under which its tensor is written: once, as
    save_pretrained does, which leaves it to the model to tie it again."""
    selection = Selection(chosen.keys, chosen.exclude)
    bytes_of = VerifiedBytes(opened)
    aliases = opened.manifest.aliases
    found: dict[str, SourceTensor] = {}
    tied: dict[str, str] = {}
    written: dict[str, str] = {}
    for name in [*opened.index, *aliases]:
        short = _below(name, chosen.subtree)
        if short is None or not selection.wants(name):
            continue
        stored = aliases.get(name, name)
        if stored in written:
            tied[short] = written[stored]
            continue
        found[short] = tensor_of(opened, bytes_of, name, chosen.rank)
        written[stored] = short
    if not found:
        raise NotFound(f"{opened.name} has no tensor that is selected; `ckptfmt inspect --tensors` lists their names")
    return found, tied


def _below(name: str, subtree: str | None) -> str | None:
    """The name of a tensor within ``subtree``; None outside of it."""
    if subtree is None or name == subtree:
        return name
    prefix = f"{subtree.rstrip('.')}."
    return name.removeprefix(prefix) if name.startswith(prefix) else None


def _entry(name: str, tensor: SourceTensor, wanted: str | None) -> PackEntry:
    word = tensor.dtype
    if wanted is not None and word in FLOATS:
        word = wanted
    start = (0,) * len(tensor.shape)
    return PackEntry(name, word, tensor.shape, start, tensor.shape, volume(tensor.shape) * dtype(word).itemsize)


# -- writing ------------------------------------------------------------------------------------------
def _write_file(
    file: RawIOBase, path: str, plan: _Plan, rows: Sequence[int], notes: dict[str, str], count: Count
) -> None:
    here = {plan.entries[row].name for row in rows}
    tied = {name: kept for name, kept in plan.tied.items() if kept in here}  # as safetensors.torch.save_model notes it
    layout = layout_pack([plan.entries[row] for row in rows], tied | notes)
    with translated("write", path, needed=layout.nbytes):
        _write(file, layout.header)
        for row in rows:
            source, entry = plan.sources[row], plan.entries[row]
            for piece in source.pieces():
                _write(file, piece if entry.dtype == source.dtype else _converted(piece, source, entry))
                count.add(piece.nbytes)


def _write(file: RawIOBase, data: bytes | memoryview) -> None:
    rest = memoryview(data)
    while rest.nbytes:
        rest = rest[file.write(rest) or 0 :]


def _converted(piece: memoryview, source: SourceTensor, entry: PackEntry) -> memoryview:
    """``InvalidInput`` where a number does not fit: it would become infinity, or none."""
    before, after = numpy_dtype(source.dtype), numpy_dtype(entry.dtype)
    assert before is not None
    assert after is not None
    values: np.ndarray[Any, Any] = np.frombuffer(piece, before)
    with np.errstate(all="ignore"):
        result = values.astype(after)
        lost = np.isfinite(values) & ~np.isfinite(result)
    if lost.any():
        raise InvalidInput(
            f"tensor {source.name!r} holds {float(values[lost][0]):g}, which {entry.dtype} cannot hold: choose another "
            "dtype, or leave the tensor out and export it by itself"
        )
    return memoryview(result.view(np.uint8).data)


def _index(plan: _Plan) -> bytes:
    total = sum(entry.nbytes for entry in plan.entries)
    placed = {plan.entries[row].name: name for name, rows in zip(plan.names, plan.files, strict=True) for row in rows}
    document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()


def _report(opened: Opened, folder: Path, plan: _Plan, several: bool) -> SafetensorsExport:
    pairs = list(zip(plan.entries, plan.sources, strict=True))
    return SafetensorsExport(
        report="export.safetensors",
        url=opened.site.backend.url,
        run=opened.info.run,
        generation_id=opened.info.id,
        step=opened.info.step,
        folder=str(folder),
        files=(*plan.names, *((INDEX,) if several else ())),
        tensors=len(pairs),
        nbytes=sum(entry.nbytes for entry in plan.entries),
        tied=plan.tied,
        cast=tuple(entry.name for entry, source in pairs if entry.dtype != source.dtype),
        as_bytes=tuple(entry.name for entry, _ in pairs if _substituted(entry.dtype)),
    )


def _substituted(word: str) -> bool:
    row = DTYPES[word]
    return bool(row.stored_suffix) or (row.stored == "U8" and word != "uint8")
