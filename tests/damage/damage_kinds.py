"""What can happen to an object: six kinds of damage, done to files, to ranges of them, and to rows."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from damage_bench import CHUNKS, Bench, state

from ckptfmt.format.pack import header_length

Spoil = Callable[[Bench], None]
WHOLE = (0, 1 << 62)


@dataclass(frozen=True)
class Spot:
    """Something to be damaged, and how. ``target`` is the id of the generation that it belongs to."""

    name: str
    target: int
    damages: Mapping[str, Spoil]
    path: Callable[[Bench], Path]
    names: Callable[[Bench], tuple[str, ...]]
    """An error counts as caught if its text or object holds one of these."""
    extent: Callable[[Bench], tuple[int, int]] = lambda bench: WHOLE
    """The damaged bytes of the file."""
    offset: Callable[[Bench], int] | None = None
    """The offset that an error has to tell."""
    catalog: bool = False
    partner_names: Callable[[Bench], tuple[str, ...]] = lambda bench: ()
    """As ``names``, where the object was swapped with another one."""


# -- files ------------------------------------------------------------------------------------------
def flip_at(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << (at % 7)
    path.write_bytes(data)


def zero_at(path: Path, start: int, stop: int) -> None:
    data = bytearray(path.read_bytes())
    assert any(data[start:stop]), "zeros in place of zeros are no damage"
    data[start:stop] = bytes(stop - start)
    path.write_bytes(data)


def swap_files(one: Path, other: Path) -> None:
    first, second = one.read_bytes(), other.read_bytes()
    assert first != second
    one.write_bytes(second)
    other.write_bytes(first)


def swap_ranges(one: Path, other: Path, start: int, stop: int) -> None:
    first, second = bytearray(one.read_bytes()), bytearray(other.read_bytes())
    assert first[start:stop] != second[start:stop]
    first[start:stop], second[start:stop] = second[start:stop], first[start:stop]
    one.write_bytes(first)
    other.write_bytes(second)


def of_file(find: Callable[[Bench], Path], other: Callable[[Bench], Path]) -> dict[str, Spoil]:
    """All six, of one file. ``other`` is the same object of another generation (or repository)."""

    def middle(path: Path) -> int:
        return path.stat().st_size // 2

    return {
        "flip": lambda bench: flip_at(find(bench), middle(find(bench))),
        "truncate": lambda bench: find(bench).write_bytes(find(bench).read_bytes()[:-1]) and None,
        "extend": lambda bench: find(bench).write_bytes(find(bench).read_bytes() + b"\0") and None,
        "delete": lambda bench: find(bench).unlink(),
        "zero": lambda bench: zero_at(find(bench), middle(find(bench)) - 4, middle(find(bench)) + 4),
        "swap": lambda bench: swap_files(find(bench), other(bench)),
    }


def small_object(name: str, target: int, other: int, pattern: str) -> Spot:
    """An object of a generation that is read whole."""

    def find(bench: Bench) -> Path:
        return bench.one(target, pattern)

    def partner_names(bench: Bench) -> tuple[str, ...]:
        """A verdict in the wrong folder names a manifest that is not there."""
        return bench.one(other, pattern).name, bench.one(other, "manifest-*").name

    return Spot(
        name,
        target,
        of_file(find, lambda bench: bench.one(other, pattern)),
        find,
        lambda bench: (find(bench).name,),
        partner_names=partner_names,
    )


# -- the objects ------------------------------------------------------------------------------------
def root_object(name: str) -> Spot:
    def find(bench: Bench) -> Path:
        return bench.root / name

    return Spot(name, 5, of_file(find, lambda bench: bench.other / name), find, lambda bench: (name,))


def pack(bench: Bench, number: int = 5) -> Path:
    return bench.one(number, "*.safetensors")


def header_bytes(bench: Bench) -> int:
    data = pack(bench).read_bytes()
    return header_length(data[:8], len(data))


def text_end(bench: Bench) -> int:
    """Where the header's padding begins."""
    return len(pack(bench).read_bytes()[: header_bytes(bench)].rstrip(b" "))


def chunk(number: int) -> Callable[[Bench], tuple[int, int]]:
    def extent(bench: Bench) -> tuple[int, int]:
        start = header_bytes(bench) + sum(CHUNKS[:number])
        return start, start + CHUNKS[number]

    return extent


def tail(bench: Bench) -> tuple[int, int]:
    """The last bytes of the file, on pages that hold nothing but the last tensor."""
    size = pack(bench).stat().st_size
    return size - 4000, size


def pack_range(
    name: str,
    extent: Callable[[Bench], tuple[int, int]],
    *,
    swap: bool = True,
    offset: Callable[[Bench], int] | None = None,
) -> Spot:
    """A range of a pack: damage that leaves the file's length alone. An error tells ``offset``, or its first byte."""

    def middle(bench: Bench) -> int:
        return sum(extent(bench)) // 2

    damages: dict[str, Spoil] = {
        "flip": lambda bench: flip_at(pack(bench), middle(bench)),
        "zero": lambda bench: zero_at(pack(bench), middle(bench) - 8, middle(bench) + 8),
    }
    if swap:
        damages["swap"] = lambda bench: swap_ranges(pack(bench), pack(bench, 4), *extent(bench))
    return Spot(
        name,
        5,
        damages,
        pack,
        lambda bench: (pack(bench).name,),
        extent,
        offset or (lambda bench: extent(bench)[0]),
    )


def whole_pack() -> Spot:
    every = of_file(pack, lambda bench: pack(bench, 4))
    return Spot(
        "pack (the file)",
        5,
        {kind: every[kind] for kind in ("truncate", "extend", "delete", "swap")},
        pack,
        lambda bench: (pack(bench).name,),
    )


def hint() -> Spot:
    def find(bench: Bench) -> Path:
        (found,) = bench.root.glob(f"runs/*/commits/*-{bench.key[5]}")
        return found

    def renamed(old: str, new: str) -> Spoil:
        return lambda bench: find(bench).rename(str(find(bench)).replace(old, new)) and None

    # It is empty: there is nothing to flip, cut or zero but its name.
    damages: dict[str, Spoil] = {
        "flip": renamed("-000000000002-", "-000000000003-"),
        "truncate": lambda bench: find(bench).rename(str(find(bench))[:-1]) and None,
        "extend": lambda bench: find(bench).write_bytes(b"\0") and None,
        "delete": lambda bench: find(bench).unlink(),
    }
    return Spot("commit hint", 5, damages, find, lambda bench: ("/commits/",))


# -- the catalog ------------------------------------------------------------------------------------
def database(bench: Bench) -> Path:
    return bench.root / "catalog.sqlite"


def named_row(bench: Bench) -> tuple[str, ...]:
    return ("catalog.sqlite", "generation 5", bench.key[5])


def catalog_row() -> Spot:
    def update(change: str) -> Spoil:
        return lambda bench: bench.sql(f"UPDATE generations SET {change} WHERE id = 5")

    def swap(bench: Bench) -> None:
        other = "(SELECT g.{0} FROM generations AS g WHERE g.id = 4)"
        columns = ("manifest_name", "manifest_digest", "manifest_bytes")
        update(", ".join(f"{column} = {other.format(column)}" for column in columns))(bench)

    digit = "CASE WHEN substr(manifest_digest, 9, 1) = '0' THEN '1' ELSE '0' END"
    damages = {
        "flip": update(f"manifest_digest = substr(manifest_digest, 1, 8) || {digit} || substr(manifest_digest, 10)"),
        "flip (step)": update("step = step + 1"),
        "truncate": update("manifest_name = substr(manifest_name, 1, 30)"),
        "extend": update("manifest_name = manifest_name || 'x'"),
        "delete": lambda bench: bench.sql("DELETE FROM generations WHERE id = 5"),
        "zero": update(f"manifest_digest = '{'0' * 32}'"),
        "swap": swap,
    }
    return Spot("catalog row", 5, damages, database, named_row, catalog=True)


def row_page(bench: Bench) -> tuple[int, int]:
    """The page of the database in which the row of generation 5 lies."""
    data = database(bench).read_bytes()
    size = int.from_bytes(data[16:18], "big")
    with sqlite3.connect(database(bench)) as connection:
        (digest,) = connection.execute("SELECT manifest_digest FROM generations WHERE id = 5").fetchone()
    connection.close()
    at = data.index(digest.encode()) // size * size
    return at, at + size


def catalog_page() -> Spot:
    def in_row(bench: Bench) -> int:
        """A byte of the row's digest."""
        with sqlite3.connect(database(bench)) as connection:
            (digest,) = connection.execute("SELECT manifest_digest FROM generations WHERE id = 5").fetchone()
        connection.close()
        start, _ = row_page(bench)
        return database(bench).read_bytes().index(digest.encode(), start) + 9

    damages: dict[str, Spoil] = {
        "flip": lambda bench: flip_at(database(bench), in_row(bench)),
        "flip (page head)": lambda bench: flip_at(database(bench), row_page(bench)[0]),
        "truncate": lambda bench: (
            database(bench).write_bytes(database(bench).read_bytes()[: row_page(bench)[0]]) and None
        ),
        "delete": lambda bench: database(bench).unlink(),
        "zero": lambda bench: zero_at(database(bench), *row_page(bench)),
        "zero (first page)": lambda bench: zero_at(database(bench), 0, 100),
    }
    return Spot("catalog page", 5, damages, database, named_row, catalog=True)


SPOTS: dict[str, Spot] = {
    spot.name: spot
    for spot in (
        root_object("ckptfmt.json"),
        root_object("catalogs/00000001.json"),
        pack_range("pack header", lambda bench: (8, text_end(bench)), swap=False, offset=lambda bench: 0),
        pack_range(
            "pack padding", lambda bench: (text_end(bench), header_bytes(bench)), swap=False, offset=lambda bench: 0
        ),
        pack_range("pack, first chunk", chunk(0)),
        pack_range("pack, middle chunk", chunk(1)),
        pack_range("pack, last chunk", chunk(2)),
        pack_range("pack, tail", tail, offset=lambda bench: tail(bench)[1] - state(5)["last"].nbytes),
        whole_pack(),
        small_object("part", 5, 4, "*.part.json"),
        small_object("manifest", 5, 4, "manifest-*"),
        small_object("COMMIT.json", 5, 4, "COMMIT.json"),
        hint(),
        small_object("RETIRED.json", 1, 2, "RETIRED.json"),
        catalog_row(),
        catalog_page(),
    )
}
