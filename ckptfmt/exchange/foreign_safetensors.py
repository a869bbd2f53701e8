"""safetensors files, and folders of them: with an index as Hugging Face writes it, or with notes of each entry's place
in its tensor, as torch's HuggingFaceStorageWriter and our own packs have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from ckptfmt.errors import FormatError
from ckptfmt.exchange.foreign import Foreign
from ckptfmt.exchange.local_file import FileRange, LocalFile
from ckptfmt.exchange.pieces import SourceArray, SourceBox, SourceTensor
from ckptfmt.exchange.weight_map import read_weight_map
from ckptfmt.format import strict_json
from ckptfmt.format.boxes import Extent, check_tiling
from ckptfmt.format.dtypes import DTYPES, dtype
from ckptfmt.format.pack import ParsedPack, header_length, parse_header

INDEX_SUFFIX: Final = ".safetensors.index.json"
_SHARDING: Final = "DCP_SHARDING_INFO"


_FOREIGN: Final = {"F8_E8M0": "float8_e8m0fnu"}
"""What others write and our packs do not."""
NAMES: Final[Mapping[str, str]] = {DTYPES[name].stored: name for name in reversed(list(DTYPES))} | _FOREIGN
"""Element type by the dtype word of a header: of several that are stored as one word, the one that it means."""
_ITEMSIZE: Final = {word: dtype(name).itemsize for word, name in NAMES.items()}


@dataclass(frozen=True)
class _Entry:
    """A tensor, or a box of one, in one file."""

    file: LocalFile
    dtype: str
    start: Extent | None
    """Its place in its tensor, where the file tells."""
    size: Extent
    offset: int


def open_file(path: Path) -> Foreign:
    """One file by itself. ``FormatError`` for a header that is none, and for parts of tensors."""
    file = LocalFile(path)
    try:
        parsed = _parsed(file)
        entries = {name: [entry] for name, entry in _entries(file, parsed).items()}
        if "ckptfmt" in parsed.metadata and _SHARDING in parsed.metadata:
            raise FormatError(
                f"{path} is one pack of a generation that several ranks saved, and holds only parts of tensors: "
                "give the generation's folder"
            )
        return Foreign("safetensors", path, _tensors(path, entries, parsed.metadata), [file], dict(parsed.metadata))
    except BaseException:
        file.close()
        raise


def open_folder(path: Path) -> Foreign:
    """All safetensors files of a folder, those that its index names if it has one.

    ``FormatError`` names the file whose index or header is wrong, the name that stands in two files, and the tensor
    that is not whole.
    """
    indices = sorted(path.glob(f"*{INDEX_SUFFIX}"))
    index = read_weight_map(indices) if indices else None
    names = index.names if index else sorted(found.name for found in path.glob("*.safetensors"))
    files: list[LocalFile] = [index.file] if index else []
    entries: dict[str, list[_Entry]] = {}
    metadata: dict[str, str] = {}
    try:
        for name in names:
            files.append(index.open(name) if index else LocalFile(path / name))
            parsed = _parsed(files[-1])
            metadata.update(parsed.metadata)
            for tensor, entry in _entries(files[-1], parsed).items():
                entries.setdefault(tensor, []).append(entry)
        _check_listed(path, index.listed if index else {}, entries)
        return Foreign("safetensors_folder", path, _tensors(path, entries, metadata), files, metadata)
    except BaseException:
        for file in files:
            file.close()
        raise


def _check_listed(path: Path, listed: Mapping[str, str], entries: Mapping[str, list[_Entry]]) -> None:
    for tensor, name in listed.items():
        if not any(entry.file.name == name for entry in entries.get(tensor, ())):
            raise FormatError(f"{path}: the index places tensor {tensor!r} in {name}, which does not have it")


def _parsed(file: LocalFile) -> ParsedPack:
    try:
        length = header_length(file.read(0, min(8, file.nbytes)), file.nbytes)
        return parse_header(file.read(0, length), file.nbytes, _ITEMSIZE)
    except FormatError as error:
        raise type(error)(f"{file.path} is no valid safetensors file: {error}") from error


def _entries(file: LocalFile, parsed: ParsedPack) -> dict[str, _Entry]:
    offsets = _saved_offsets(file, parsed)
    return {
        entry.name: _Entry(file, NAMES[entry.stored], offsets.get(entry.name), entry.shape, entry.offset)
        for entry in parsed.entries
    }


class _Place(msgspec.Struct):
    saved_offsets: tuple[int, ...]


def _saved_offsets(file: LocalFile, parsed: ParsedPack) -> dict[str, Extent]:
    text = parsed.metadata.get(_SHARDING)
    if text is None:
        return {}
    what = f"{file.path}: {_SHARDING}"
    places = strict_json.convert(strict_json.parse(text.encode("utf-8", "replace"), what), dict[str, _Place], what)
    return {name: place.saved_offsets for name, place in places.items()}


def _tensors(path: Path, entries: Mapping[str, list[_Entry]], metadata: Mapping[str, str]) -> dict[str, SourceTensor]:
    made = SourceArray if metadata.get("format") in ("np", "numpy") else SourceTensor
    return {name: _tensor(path, made, name, found) for name, found in sorted(entries.items())}


def _tensor(path: Path, made: type[SourceTensor], name: str, entries: list[_Entry]) -> SourceTensor:
    first = entries[0]
    if len({entry.dtype for entry in entries}) > 1:
        raise FormatError(f"{path}: tensor {name!r} is {first.dtype} in {first.file.name} and another type elsewhere")
    if first.start is None or any(entry.start is None for entry in entries):
        if len(entries) > 1:
            raise FormatError(f"{path}: tensor {name!r} stands in {first.file.name} and in {entries[1].file.name}")
        box = SourceBox((0,) * len(first.size), first.size, FileRange(first.file, first.offset))
        return made(name, first.dtype, first.size, (box,), first.file.name)
    boxes: dict[tuple[Extent, Extent], _Entry] = {}
    for entry in entries:
        if entry.start is None or len(entry.start) != len(entry.size):
            raise FormatError(f"{path}: tensor {name!r} has {len(entry.size)} dimensions, its place in it has others")
        boxes.setdefault((entry.start, entry.size), entry)
    ndim = {len(start) for start, _ in boxes}
    if len(ndim) > 1:
        raise FormatError(f"{path}: the parts of tensor {name!r} have different numbers of dimensions")
    shape = tuple(max(start[d] + size[d] for start, size in boxes) for d in range(ndim.pop()))
    reason = check_tiling(shape, list(boxes)).reason
    if reason is not None:
        raise FormatError(f"{path}: tensor {name!r} is not whole: {reason}; all files of the save belong together")
    found = [SourceBox(start, size, FileRange(entry.file, entry.offset)) for (start, size), entry in boxes.items()]
    return made(name, first.dtype, shape, found, first.file.name)
