"""``make bench-ranks``: what a commit of many ranks costs, measured without the machines.

    python -m benchmarks.ranks [--folder DIR] [--only GROUP ...] [--rounds N] [--quick]

A real PostgreSQL that syncs, real part objects with made-up digests, packs that are sparse files of the right length,
and the library's own C1 to C5 in a fresh process, its ranks simulated by a second one. A fresh process opens what was
committed and finds one rank's share. Real processes, one for each of 64 ranks, are what the simulation is held against.
Everything lies in the page cache of one host: what a shared file system adds is not in these figures. Each figure is
the best of several rounds, as others may be using the machine. Writes ``ranks.json`` and ``ranks.txt``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.ranks_tables import goals_of, text_of
from benchmarks.run import describe_machine

ROOT: Final = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests"))

from postgres_rig import PostgresServer, migrated_database, postgres_server  # noqa: E402

from ckptfmt.demo.postgres import binaries  # noqa: E402
from ckptfmt.errors import InvalidInput  # noqa: E402

_COUNTED: Final = ("generations", "saves", "ranks", "packs", "generation_packs", "events", "messages")


@dataclass(frozen=True)
class Case:
    """One simulated world and where its ranks meet."""

    group: str
    ranks: int
    tensors: int
    layout: str
    place: str = "c10d"

    @property
    def name(self) -> str:
        return f"{self.ranks} x {self.tensors} {self.layout}"


def _cases(quick: bool) -> list[Case]:
    if quick:
        return [
            Case("curve", 2, 3, "even"),
            Case("curve", 8, 3, "even"),
            Case("large", 16, 30, "even"),
            Case("large", 16, 30, "mesh"),
            Case("reader", 16, 20, "even"),
            Case("one by one", 4, 3, "even", "catalog"),
            Case("anchor", 4, 10, "tiny"),
        ]
    return [
        *(Case("curve", ranks, 64, "even") for ranks in (64, 256, 1024, 4096, 16384)),
        *(Case("large", ranks, 1000, layout) for ranks in (64, 256, 1024) for layout in ("even", "mesh")),
        Case("reader", 1024, 293, "even"),
        Case("reader", 1024, 364, "mesh"),
        *(Case("one by one", ranks, 64, "even", "catalog") for ranks in (64, 256, 1024)),
        Case("anchor", 64, 1000, "tiny"),
    ]


GROUPS: Final = ("curve", "large", "reader", "one by one", "anchor")


def main() -> None:
    arguments = _parser().parse_args()
    _require_server()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    machine = describe_machine()
    began = time.monotonic()
    cases = [case for case in _cases(arguments.quick) if case.group in (arguments.only or GROUPS)]
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder, postgres_server(fsync=True) as server:
        template = migrated_database(server)
        for case in cases:
            for _ in range(1 if arguments.quick else arguments.rounds):
                for sample in measure(case, server, template, Path(folder)):
                    found.append(sample)
                    print(f"{sample['name']}, {sample['kind']}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    document = {"machine": machine | {"seconds": time.monotonic() - began}, "samples": found, "goals": goals_of(found)}
    text = text_of(document, tiny=arguments.quick)
    print(text)
    (arguments.folder / "ranks.txt").write_text(text)
    (arguments.folder / "ranks.json").write_text(json.dumps(document, indent=1))


def _require_server() -> None:
    try:
        binaries()
    except InvalidInput as error:
        sys.exit(f"{error}: pip install -e '.[test]'")


def measure(case: Case, server: PostgresServer, template: str, folder: Path) -> Iterator[dict[str, Any]]:
    """One round of a case: the simulation, and for the anchor real processes in both places, too."""
    facts = {"group": case.group, "ranks": case.ranks, "tensors": case.tensors, "layout": case.layout}
    yield (
        facts
        | {"name": case.name, "kind": "simulated", "place": case.place}
        | _simulated(case, server, template, folder)
    )
    if case.group == "anchor":
        for place in ("c10d", "catalog"):
            words = [str(case.ranks), str(case.tensors), place]
            database, root = server.url(server.new_database(template)), _fresh(folder)
            real = _called("ranks_anchor", [str(root), database, *words])
            shutil.rmtree(root)
            yield facts | {"name": f"{case.name}, {place}", "kind": "real", "place": place} | real


def _simulated(case: Case, server: PostgresServer, template: str, folder: Path) -> dict[str, Any]:
    database = server.new_database(template)
    url, root = server.url(database), _fresh(folder)
    world = [str(case.ranks), str(case.tensors), case.layout]
    told = _called("ranks_coordinator", [str(root), url, *world, case.place])
    told["rows"] = _rows(server, database)
    manifest = told["manifest"]
    place = root / manifest["folder"] / manifest["name"]
    told["reader"] = _called("ranks_reader", [str(root), url, *world, str(case.ranks // 2), str(place)])
    shutil.rmtree(root)
    return told


def _fresh(folder: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=folder)) / "repository"


def _rows(server: PostgresServer, database: str) -> dict[str, int]:
    return {table: server.run(f"SELECT count(*) FROM {table}", database=database)[0][0] for table in _COUNTED}


def _called(module: str, words: Sequence[str]) -> dict[str, Any]:
    """What a module of this folder prints, run in a fresh process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", f"benchmarks.{module}", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT, env=environment)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("bench-results"), help="where to write (%(default)s)")
    parser.add_argument("--only", action="append", choices=GROUPS, help="measure this group; may be repeated")
    parser.add_argument("--rounds", type=int, default=3, help="of each case; the best one counts (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="tiny worlds, one round: does it run, nothing more")
    return parser


if __name__ == "__main__":
    main()
