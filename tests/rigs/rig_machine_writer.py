"""Saves for ever, and says of each save when it was reported: ``rig_machine_writer.py ROOT SAID MUTANT``."""

from __future__ import annotations

import os
import sys
from itertools import count
from pathlib import Path

from rig_jobs import RUN, Place, state_of
from rig_meter import Meter


def main(root: str, said: str, mutant: str) -> None:
    kept = Meter(lambda change: None, mutant=mutant).install()
    out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with Place(Path(root)).open() as repository, repository.checkpointer(RUN) as checkpointer:
        for step in count(1):
            pending = checkpointer.save(state_of(step), step=step)
            assert pending is not None
            pending.result()
            os.write(out, f"{step}\n".encode())
    del kept


if __name__ == "__main__":
    main(*sys.argv[1:])
