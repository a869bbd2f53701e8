"""``make bench``: import time, and stall and commit time beside torch.save and DCP.

    python benchmarks/run.py [--folder DIR] [--megabytes 500] [--rounds 3] [--saves 3]

Every measurement is a fresh process; contenders take turns, so that a slow minute of the machine meets all of them.
Absolute figures do not travel between machines; the ratios do.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

CONTENDERS = ("ckptfmt", "torch.save + fsync", "DCP async_save")


def seconds_of(code: str, times: int = 7) -> float:
    """Least wall time of a fresh interpreter that runs ``code``, less the least of one that runs nothing."""

    def once(program: str) -> float:
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - began

    once(code)  # the first one compiles and fills the page cache
    pairs = [(once(code), once("pass")) for _ in range(times)]
    return min(one for one, _ in pairs) - min(nothing for _, nothing in pairs)


def command(*words: str) -> str:
    return f"import sys; sys.argv = ['ckptfmt', *{list(words)!r}]\nfrom ckptfmt.cli.main import main\nsys.exit(main())"


def measure_imports(folder: Path) -> None:
    repository = folder / "imports"
    save = f"import ckptfmt, numpy; ckptfmt.save({{'x': numpy.zeros(4)}}, {str(repository)!r})"
    subprocess.run([sys.executable, "-c", save], check=True)
    print("\nStart, without that of Python itself (best of 7)")
    for title, code in (
        ("import ckptfmt", "import ckptfmt"),
        ("import numpy (for scale)", "import numpy"),
        ("import torch (for scale)", "import torch"),
        ("ckptfmt --help", command("--help")),
        ("ckptfmt ls REPOSITORY", command("ls", str(repository))),
    ):
        print(f"  {title:<26} {seconds_of(code) * 1e3:7.0f} ms", flush=True)


def measure_saves(folder: Path, *, megabytes: int, rounds: int, saves: int) -> None:
    """First saves of a process are told apart: memory is touched, structure is planned."""
    found: dict[str, list[dict[str, list[float]]]] = {name: [] for name in CONTENDERS}
    nbytes = 0
    for turn in range(rounds):
        for name in CONTENDERS[turn % 3 :] + CONTENDERS[: turn % 3]:
            place = Path(tempfile.mkdtemp(dir=folder))
            words = [sys.executable, str(Path(__file__).with_name("contender.py")), name, place, megabytes, saves]
            done = subprocess.run(list(map(str, words)), check=True, stdout=subprocess.PIPE, text=True)
            shutil.rmtree(place)
            os.sync()  # what one left to write is not the next one's burden
            result = json.loads(done.stdout.splitlines()[-1])
            found[name].append(result)
            nbytes = result["nbytes"]
    print(f"\nA state of {nbytes / 1e6:.0f} MB, {rounds} rounds of {saves} saves (medians; later: from the second on)")
    print(f"  {'':<20} {'first stall':>12} {'later stall':>12} {'first commit':>13} {'later commit':>13} {'MB/s':>7}")
    later: dict[str, tuple[float, float]] = {}
    for name, results in found.items():
        stall, commit = (median(x for one in results for x in one[key][1:]) for key in ("stalls", "commits"))
        first_stall, first_commit = (median(one[key][0] for one in results) for key in ("stalls", "commits"))
        later[name] = stall, commit
        print(
            f"  {name:<20} {first_stall * 1e3:>9.0f} ms {stall * 1e3:>9.0f} ms {first_commit:>11.2f} s "
            f"{commit:>11.2f} s {nbytes / commit / 1e6:>7.0f}"
        )
    own_stall, own_commit = later["ckptfmt"]
    for name in CONTENDERS[1:]:
        stall, commit = later[name]
        print(
            f"  {name}: {stall / own_stall:.1f} times our later stall, {commit / own_commit:.1f} times our later commit"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--folder", type=Path, default=Path("bench-results"), help="where to write (default: %(default)s)"
    )
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--saves", type=int, default=3, help="per process, at least 2")
    arguments = parser.parse_args()
    if arguments.saves < 2:
        parser.error("--saves must be at least 2: the first one of a process is told apart")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    print(f"Python {platform.python_version()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
    try:
        measure_saves(folder, megabytes=arguments.megabytes, rounds=arguments.rounds, saves=arguments.saves)
        measure_imports(folder)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
