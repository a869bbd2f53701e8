"""A training loop whose every save gets an OCDBT database once it is committed, by one line."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptfmt
from ckptfmt import connect
from ckptfmt.errors import Conflict, OutOfSpace
from ckptfmt.exchange.ocdbt_export import export_ocdbt, index_when_committed
from ckptfmt.format import ocdbt
from ckptfmt.repository import Repository
from ckptfmt.testing.faults import Call, Fault, FaultyBackend

STEPS = range(1, 4)
READER = """
import json, sys

sys.modules["ckptfmt"] = None  # importing it fails
import tensorstore

found = []
for base in json.loads(sys.argv[1]):
    kvstore = {"driver": "ocdbt", "base": base, "path": "model.w/"}
    array = tensorstore.open({"driver": "zarr3", "kvstore": kvstore}, read=True).result()
    found.append(array.read().result().tolist())
print(json.dumps(found))
"""


def read_elsewhere(bases: list[Any], **environment: str) -> Any:
    """What a process without ckptfmt reads of ``model.w`` through the databases of these folders."""
    done = subprocess.run(
        [sys.executable, "-c", READER, json.dumps(bases)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def train(repository: Repository) -> list[ckptfmt.Generation]:
    """Returns what the loop has committed, oldest first."""
    weight = np.zeros(5)
    with repository.checkpointer("train", every_steps=1) as checkpointer:
        for step in STEPS:
            weight += 1
            if checkpointer.should_save(step):
                checkpointer.save({"model": {"w": weight}}, step=step).add_done_callback(index_when_committed)  # type: ignore[union-attr]
    return [repository.generation(info.id) for info in reversed(repository.generations(run="train"))]


def weights(steps: Any = STEPS) -> list[list[float]]:
    return [[float(step)] * 5 for step in steps]


def test_on_a_local_disk(tmp_path: Path) -> None:
    with ckptfmt.open(tmp_path / "r") as repository:
        generations = train(repository)
        assert [generation.step for generation in generations] == list(STEPS)
        assert read_elsewhere([f"{generation.url}/" for generation in generations]) == weights()


def test_on_s3(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    from s3_rig import KEY, SECRET

    server = request.getfixturevalue("seaweed")
    root = server.new_root()
    with ckptfmt.open(
        f"s3://{root}", catalog=f"sqlite:///{tmp_path / 'catalog.db'}", storage_options=server.options()
    ) as repository:
        bucket, _, prefix = root.partition("/")
        bases = [
            {
                "driver": "s3",
                "bucket": bucket,
                "path": f"{prefix}/{generation._opened.folder}/",
                "endpoint": server.endpoint,
                "aws_region": "us-east-1",
                "aws_credentials": {"type": "environment"},
            }
            for generation in train(repository)
        ]
    assert read_elsewhere(bases, AWS_ACCESS_KEY_ID=KEY, AWS_SECRET_ACCESS_KEY=SECRET) == weights()


def full_disk() -> OutOfSpace:
    return OutOfSpace("no space is left for the database")


def broken() -> RuntimeError:
    return RuntimeError("nobody expected this")


@pytest.mark.slow
@pytest.mark.parametrize("error", [full_disk, broken])
def test_a_database_that_cannot_be_written_is_told_and_harms_no_save(
    error: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manifests: list[str] = []

    def of_the_second(call: Call) -> bool:
        manifests.extend([call.key] if call.key.endswith(ocdbt.MANIFEST) else ())
        return len(manifests) == 2

    fault = Fault("create", error=error, when=of_the_second)
    connection = connect.open_site(tmp_path / "r", mode="w", catalog=None, storage_options=None)
    site = dataclasses.replace(connection.site, backend=FaultyBackend(connection.site.backend, fault))
    with (
        caplog.at_level(logging.WARNING, "ckptfmt"),
        Repository(dataclasses.replace(connection, site=site), "w") as repository,
    ):
        generations = train(repository)
    assert fault.fired == 1
    assert [generation.step for generation in generations] == list(STEPS)
    assert all(generation.verify().ok for generation in generations)
    assert read_elsewhere([f"{generations[at].url}/" for at in (0, 2)]) == weights((1, 3))
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "#2 of run 'train', step 2" in record.getMessage()
    told = record.getMessage() if record.exc_info is None else str(record.exc_info[1])
    assert str(error()) in told
    made_up = export_ocdbt(generations[1]._opened)
    assert read_elsewhere([made_up.base]) == weights((2,))
    with pytest.raises(Conflict):
        export_ocdbt(generations[1]._opened)
