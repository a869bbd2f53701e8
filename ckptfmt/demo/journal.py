"""What a training process tells its parent: JSON lines that survive the process."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class Journal:
    """Appends one event per line. A line that was written is in the kernel, whatever kills the process next."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def tell(self, event: str, **fields: Any) -> None:
        os.write(self._descriptor, (json.dumps({"event": event, **fields}) + "\n").encode())


def read_journal(path: Path) -> list[dict[str, Any]]:
    """All events so far; an unfinished last line is left out."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def rank_journal(path: Path, rank: int) -> Path:
    """The journal of one of several ranks that were given ``path``."""
    return path.with_name(f"{path.stem}-rank{rank}{path.suffix}")


def losses(events: list[dict[str, Any]]) -> dict[int, str]:
    """Loss per step, as ``float.hex`` text: equal text is equal to the last bit."""
    return {event["step"]: event["loss"] for event in events if event["event"] == "step"}
