"""The fixture's side of ``rig_faulty_mount``: mounts it, gives it rules, reads its log."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rig_needs import lacking

_READY_SECONDS = 20


class FaultyDisk:
    """``place`` shows ``behind`` and fails by the rules of ``fail``."""

    def __init__(self, work: Path) -> None:
        self.behind = work / "behind"
        self.place = work / "faulty"
        self._rules = work / "rules.json"
        self._log = work / "log"
        for folder in (self.behind, self.place):
            folder.mkdir()
        self._log.touch()
        self.heal()
        program = Path(__file__).with_name("rig_faulty_mount.py")
        arguments = (self.behind, self.place, self._rules, self._log)
        self._process = subprocess.Popen(
            [sys.executable, str(program), *map(str, arguments)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        until = time.monotonic() + _READY_SECONDS
        while not os.path.ismount(self.place):
            if self._process.poll() is not None or time.monotonic() > until:
                lacking(f"FUSE does not mount here: {self.release()[-500:]}")
            time.sleep(0.01)

    def fail(self, op: str, code: int | None = None, **rule: Any) -> None:
        """Break one kind of call from now on; see ``rig_faulty_mount``. The log begins anew."""
        self._write([{"op": op, **({} if code is None else {"errno": code}), **rule}])
        self._log.write_bytes(b"")

    def heal(self) -> None:
        self._write([])

    def _write(self, rules: list[dict[str, Any]]) -> None:
        new = self._rules.with_suffix(".new")
        new.write_text(json.dumps(rules))
        new.replace(self._rules)

    def calls(self) -> list[tuple[str, str, int]]:
        """(op, path, errno or 0) since the last ``fail``."""
        lines = self._log.read_text().splitlines()
        return [(op, path, int(code)) for op, path, code in (line.split(" ") for line in lines)]

    def release(self) -> str:
        """Take it down; what its process had to say."""
        subprocess.run(["umount", "-l", str(self.place)], check=False, capture_output=True)
        try:
            _, said = self._process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            _, said = self._process.communicate()
        return said.decode(errors="replace")
