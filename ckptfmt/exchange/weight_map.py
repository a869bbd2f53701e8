"""The index beside numbered files, as Hugging Face's tools write it: which file each tensor lies in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from ckptfmt.errors import FormatError, InvalidInput, NotFound
from ckptfmt.exchange.local_file import LocalFile, plain_name
from ckptfmt.format import strict_json

_BYTES_MAX: Final = 256 << 20


class _Index(msgspec.Struct):
    weight_map: dict[str, str]
    metadata: Any = None


@dataclass(frozen=True)
class WeightMap:
    """``file`` is the index itself; ``listed`` has the name of a file beside it for each tensor."""

    file: LocalFile
    listed: Mapping[str, str]

    @property
    def names(self) -> list[str]:
        """Of the files that hold tensors."""
        return sorted(set(self.listed.values()))

    def open(self, name: str) -> LocalFile:
        """One of those files. ``NotFound`` tells which tensors should lie in it."""
        try:
            return LocalFile(self.file.path.parent / name)
        except NotFound as error:
            here = [tensor for tensor, place in self.listed.items() if place == name]
            others = f" and {len(here) - 1} more" if len(here) > 1 else ""
            raise NotFound(
                f"{self.file.path.parent / name} is not there, and {self.file.name} places tensor {here[0]!r}{others} "
                "in it: get that file, too"
            ) from error


def read_weight_map(paths: Sequence[Path]) -> WeightMap:
    """Read the index at the one path. ``InvalidInput`` for several, ``FormatError`` for what is none."""
    path, *others = paths
    if others:
        raise InvalidInput(
            f"{path.parent} has {len(paths)} indices ({', '.join(one.name for one in paths)}): put the files of one "
            "into a folder of their own"
        )
    file = LocalFile(path)
    try:
        if file.nbytes > _BYTES_MAX:
            raise FormatError(f"{path} has {file.nbytes} bytes, more than any index of numbered files")
        return WeightMap(file, parse_index(file.read(0, file.nbytes), str(path)))
    except BaseException:
        file.close()
        raise


def parse_index(text: bytes, what: str) -> dict[str, str]:
    """Tensor name -> plain file name. ``FormatError`` naming ``what`` for anything else, also for names that lead out
    of the folder."""
    index = strict_json.convert(strict_json.parse(text, what), _Index, what)
    for tensor, name in index.weight_map.items():
        try:
            plain_name(name)
        except FormatError as error:
            raise FormatError(f"{what}: tensor {tensor[:120]!r} does not lie in a file beside it: {error}") from None
    return index.weight_map
