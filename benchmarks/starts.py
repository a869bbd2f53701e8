"""How long a process takes from its start: imports and commands, beside Python that does nothing."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

_COLUMNS = (
    "repository_id, run_id, launch_id, save_number, key, step, state, fence, world_size, epoch, created_at,"
    " manifest_name, manifest_digest, manifest_bytes, nbytes"
)


def measure_starts(repository: Path, count: int) -> dict[str, list[float]]:
    """Seconds of whole processes, ``count`` of each in turns, after one of each that fills the caches."""
    programs = {
        "python": ["-c", "pass"],
        "import ckptfmt": ["-c", "import ckptfmt"],
        "ckptfmt --help": ["-m", "ckptfmt.cli.main", "--help"],
        "ckptfmt ls": ["-m", "ckptfmt.cli.main", "ls", f"{repository}#bench"],
        "ckptfmt ls --limit 0": ["-m", "ckptfmt.cli.main", "ls", f"{repository}#bench", "--limit", "0"],
        "import torch": ["-c", "import torch"],
    }
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    found: dict[str, list[float]] = {name: [] for name in programs}
    for turn in range(count + 1):
        for name, words in programs.items():
            began = time.perf_counter()
            subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL, env=environment)
            if turn:
                found[name].append(time.perf_counter() - began)
    return found


def fill_catalog(repository: Path, generations: int) -> None:
    """A repository whose catalog lists so many committed generations; only the first has bytes on storage."""
    import numpy as np

    import ckptfmt

    ckptfmt.save({"w": np.zeros(4)}, repository, run="bench")
    with closing(sqlite3.connect(repository / "catalog.sqlite")) as connection, connection:
        (now,) = connection.execute("SELECT created_at FROM generations").fetchone()
        connection.executemany(
            f"INSERT INTO generations ({_COLUMNS}) VALUES (1, 1, 1, ?, ?, ?, 'writing', 1, 1, 1, ?, 'm', 'd', 1, 1000)",
            [(n, f"{n:032x}", n * 10, now) for n in range(1, generations)],
        )
        connection.execute("UPDATE generations SET state = 'durable' WHERE state = 'writing'")
        connection.execute(
            "UPDATE generations SET state = 'committed', commit_seq = id, commit_fence = 1, committed_at = created_at"
            " WHERE state = 'durable'"
        )
        connection.execute(
            "INSERT INTO ranks (generation_id, rank, state, part_name, part_digest, nbytes, stall_seconds, retries,"
            " updated_at) SELECT id, 0, 'durable', 'p', 'd', 1000, 0.1, 0, created_at FROM generations WHERE id > 1"
        )
