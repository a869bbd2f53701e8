"""Every kind of damage to every kind of object, on every way to read: caught by name, or proved not to be used.

The table that the log of the tests shows at its end is made of what happened here.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import pytest
from damage_bench import Bench, Seen
from damage_kinds import SPOTS, Spot
from damage_paths import PATHS, Answer, Target, Told

import ckptfmt
from ckptfmt.errors import CkptError

READS_ALL = {
    "load",
    "restore",
    "restore, cached pages",
    "restore atomic=False",
    "Checkpointer.restore",
    "restore fallback=True",
    "load catalog=none",
    "folder by itself",
    "verify",
}
EVERY = set(PATHS)
BY_PROOF = {"load catalog=none", "folder by itself"}
BY_CATALOG = EVERY - BY_PROOF
WRITERS = {"Checkpointer.restore", "restore fallback=True"}
"""Paths that open the repository for writing."""
DEPENDS: dict[str, set[str]] = {
    "ckptfmt.json": EVERY - {"folder by itself"},
    "catalogs/00000001.json": EVERY - {"folder by itself"},
    "pack header": {"verify"},
    "pack padding": {"verify"},
    "pack, first chunk": READS_ALL | {"slice of chunk 1"},
    "pack, middle chunk": READS_ALL | {"slice over chunks 2, 3"},
    "pack, last chunk": READS_ALL | {"slice over chunks 2, 3"},
    "pack, tail": READS_ALL | {"slice at the end"},
    "pack (the file)": EVERY,
    "part": set(),
    "manifest": EVERY,
    "COMMIT.json": BY_PROOF,
    "commit hint": set(),
    "RETIRED.json": BY_PROOF,
    "catalog row": BY_CATALOG,
    "catalog page": BY_CATALOG,
}
"""Which paths need the object: there its damage has to be caught. Elsewhere it is enough that none of it is used."""
EXCEPTIONS: dict[tuple[str, str], dict[str, str]] = {
    # Lengths are those that the manifest tells, and bytes are not looked at.
    ("pack (the file)", "swap"): {"inspect": "not read", "diff": "not read"},
    # Readers go by the catalog's own epoch; a writer makes the claim again, byte for byte.
    ("catalogs/00000001.json", "delete"): dict.fromkeys(EVERY, "not read") | dict.fromkeys(WRITERS, "made again"),
    # A listing cannot show what is lost. Who must not miss a commit reads the verdict in every folder.
    ("COMMIT.json", "delete"): {"load catalog=none": "older, told"},
    ("commit hint", "flip"): {"load catalog=none": "older, told"},
    ("commit hint", "truncate"): {"load catalog=none": "older"},
    ("commit hint", "delete"): {"load catalog=none": "older"},
    # Without its tombstone it is what its verdict says: committed, and as long as its bytes are there, whole.
    ("RETIRED.json", "delete"): dict.fromkeys(BY_PROOF, "opened"),
    # The catalog is what says that there are rows.
    ("catalog row", "delete"): dict.fromkeys(EVERY, "older"),
}


@dataclass(frozen=True)
class Outcome:
    word: str
    detail: str = ""


class Judge:
    """Judges what a path gave, by what was known of the object before it was damaged."""

    def __init__(self, spot: Spot, kind: str, bench: Bench) -> None:
        self.spot = spot
        self.path = spot.path(bench)
        self.names = spot.names(bench) + (spot.partner_names(bench) if kind == "swap" else ())
        self._sound = self.path.read_bytes()
        self._gone = kind == "delete" and not spot.catalog
        self.extent = spot.extent(bench)
        self.offset = None if spot.offset is None else spot.offset(bench)
        self._key = bench.object_key(self.path)
        self._in_folder = self.path.parent == bench.folder(spot.target)

    def outcome(
        self, path: str, target: Target, sound: Answer | CkptError, caplog: pytest.LogCaptureFixture
    ) -> Outcome:
        caplog.clear()
        with target.bench.watched(cached=path == "restore, cached pages") as seen:
            try:
                answer: Answer | CkptError = PATHS[path](target)
            except CkptError as error:
                answer = error
        if self._gone and self.path.exists():
            return Outcome("made again" if self.path.read_bytes() == self._sound else "REPLACED")
        used = self._used(seen, by_itself=path == "folder by itself")
        if isinstance(answer, CkptError):
            return self._of_error(answer, sound, used)
        if answer.problems:
            return self._of_problems(answer.problems, sound, used)
        return self._of_answer(answer, sound, used, [record.getMessage() for record in caplog.records])

    def _of_answer(self, answer: Answer, sound: Answer | CkptError, used: bool, log: list[str]) -> Outcome:
        if not answer.is_true():
            return Outcome("WRONG")
        told = any(name in text for name in self.names for text in log)
        if answer.fell_back_from:
            return Outcome("fell back" if answer.fell_back_from == (self.spot.target,) and told else "UNTOLD")
        if not isinstance(sound, Answer):
            return Outcome("opened")
        if answer.step != sound.step:
            return Outcome("older, told" if told else "older")
        if answer.report != sound.report:
            return Outcome("OTHER", str(answer.report))
        return Outcome("UNNOTICED") if used else Outcome("not read")

    def _of_error(self, error: CkptError, sound: Answer | CkptError, used: bool) -> Outcome:
        if self._named(f"{error} {getattr(error, 'object', None)}"):
            told = getattr(error, "offset", None)
            right = self.offset is None or told == self.offset
            return Outcome("caught") if right else Outcome("OFFSET", f"{told} is not {self.offset}")
        if type(error) is type(sound) and not used:
            return Outcome("not read")
        return Outcome("UNNAMED", f"{type(error).__name__}: {error}")

    def _of_problems(self, problems: list[Told], sound: Answer | CkptError, used: bool) -> Outcome:
        if all(self._named(told.text) for told in problems):
            right = self.offset is None or self.offset in [told.offset for told in problems]
            return Outcome("caught") if right else Outcome("OFFSET", f"{problems} do not tell {self.offset}")
        if isinstance(sound, Answer) and sound.problems == problems and not used:
            return Outcome("not read")
        return Outcome("UNNAMED", str(problems))

    def _named(self, text: str) -> bool:
        return any(name in text for name in self.names)

    def _used(self, seen: Seen, *, by_itself: bool) -> bool:
        """Whether anything of the damaged bytes was looked at."""
        if self.spot.catalog:
            return seen.catalog_opened
        if by_itself and not self._in_folder:
            return False
        key = self.path.name if by_itself else self._key
        start, stop = self.extent
        return any(op == "read" and name == key and a < stop and b > start for op, name, a, b in seen.calls)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("damage"))


@pytest.fixture(scope="module")
def sound(bench: Bench) -> dict[tuple[int, str], Answer | CkptError]:
    """What every path gives where nothing is damaged."""
    found: dict[tuple[int, str], Answer | CkptError] = {}
    for number in (5, 1):
        for path, read in PATHS.items():
            with bench.watched(cached=path == "restore, cached pages") as seen:
                try:
                    found[number, path] = read(Target(bench, number))
                except CkptError as error:
                    found[number, path] = error
            assert number == 1 or path != "restore, cached pages" or seen.shown, (
                "this file system shows no cached pages"
            )
        bench.reset()
    return found


def test_without_damage_all_is_read_and_a_retired_generation_is_not(
    sound: dict[tuple[int, str], Answer | CkptError],
) -> None:
    for (number, path), answer in sound.items():
        if number == 5:
            assert isinstance(answer, Answer), (path, answer)
            assert answer.is_true()
            assert not answer.problems
        elif path not in ("restore fallback=True", "inspect"):  # the first takes another one, the second shows it
            assert isinstance(answer, ckptfmt.NotCommitted) or (isinstance(answer, Answer) and answer.problems), path


@pytest.mark.parametrize("name", SPOTS)
def test_damage(
    name: str,
    bench: Bench,
    sound: dict[tuple[int, str], Answer | CkptError],
    caplog: pytest.LogCaptureFixture,
    record_damage: object,
) -> None:
    spot = SPOTS[name]
    target = Target(bench, spot.target)
    caplog.set_level(logging.WARNING, "ckptfmt")
    wrong: list[str] = []
    for kind, damage in spot.damages.items():
        bench.reset()
        judge = Judge(spot, kind, bench)
        for path in PATHS:
            if path in WRITERS or path == next(iter(PATHS)):  # what the one before has written is no part of it
                bench.reset()
                damage(bench)
            found = judge.outcome(path, target, sound[spot.target, path], caplog)
            record_damage(name, kind, path, found.word)  # type: ignore[operator]
            allowed = {"caught", "fell back"} if path in DEPENDS[name] else {"caught", "not read"}
            allowed.add(EXCEPTIONS.get((name, kind), {}).get(path, "caught"))
            if found.word not in allowed:
                wrong.append(f"{name}, {kind}, {path}: {found.word} {found.detail[:300]}")
    bench.reset()
    assert not wrong, "\n" + "\n".join(wrong)
