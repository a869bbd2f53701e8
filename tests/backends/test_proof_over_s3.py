"""An inference host reads a part of a model from a real S3 server: by proof, with no SQL library, and counted."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from fsspec_rig import s3_options
from s3_rig import SeaweedServer
from tcp_proxy import Gate, TcpProxy

import ckptfmt
from ckptfmt import connect


class Counting(Gate):
    """Counts requests by what they are, and the bytes of all answers."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.nbytes = 0

    def to_server(self, connection: int, data: bytes) -> bytes | None:
        for verb, target in re.findall(rb"(GET|HEAD|PUT|POST|DELETE) (\S+) HTTP/1", data):
            # s3fs asks for at most one key to tell an object that is not there from a folder.
            listing = b"list-type" in target and b"max-keys=1&" not in target
            ranged = b"safetensors" in target
            self.asked["list" if listing else "pack" if ranged else verb.decode().lower()] += 1
        return data

    def to_client(self, connection: int, data: bytes) -> bytes | None:
        self.nbytes += len(data)
        return data


_LOAD = """
import json, sys
for name in ("sqlalchemy", "alembic", "sqlite3", "_sqlite3", "psycopg"):
    sys.modules[name] = None
import ckptfmt
model = ckptfmt.load(sys.argv[1], subtree="model", storage_options=json.loads(sys.argv[2]))
print(json.dumps({name: value.tolist() for name, value in model.items()}))
"""


@pytest.mark.slow
def test_a_model_is_read_by_one_listing_and_ranges(seaweed: SeaweedServer, tmp_path: Path) -> None:
    model = {f"layer{number}": np.arange(number, number + 50.0) for number in range(20)}
    url = f"fsspec+s3://{seaweed.new_root()}"
    for step in range(2):
        ckptfmt.save(
            {"model": model, "optimizer": np.ones(12 << 20, np.uint8)},
            f"{url}#llama",
            step=step,
            catalog=f"sqlite:///{tmp_path}/c.sqlite",
            storage_options=s3_options(seaweed.endpoint),
        )
    counting = Counting()
    with closing(TcpProxy(seaweed.port, counting)) as proxy:
        environment = {name: value for name, value in os.environ.items() if name != connect.CATALOG_VARIABLE}
        options = json.dumps(s3_options(f"http://127.0.0.1:{proxy.port}"))
        done = subprocess.run(
            [sys.executable, "-c", _LOAD, f"{url}#llama", options],
            capture_output=True,
            text=True,
            timeout=150,
            env=environment,
        )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {name: value.tolist() for name, value in model.items()}
    assert counting.asked["list"] == 1
    assert counting.asked["pack"] == 1
    assert counting.nbytes < 1 << 20
