"""A generation on S3, opened by plain TensorStore through its OCDBT database."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ckptfmt
from ckptfmt.exchange.ocdbt_export import export_ocdbt

COPY_AND_READ = """
import json, os, sys

sys.modules["ckptfmt"] = None  # importing it fails
import tensorstore

source, target = sys.argv[1], json.loads(sys.argv[2])
place = tensorstore.KvStore.open(target).result()
for name in os.listdir(source):
    with open(f"{source}/{name}", "rb") as file:
        place.write(name, file.read()).result()
found = {}
for node in sys.argv[3:]:
    kvstore = {"driver": "ocdbt", "base": target, "path": f"{node}/"}
    array = tensorstore.open({"driver": "zarr3", "kvstore": kvstore}, read=True).result()
    found[node] = [array.dtype.name, list(array.shape), array.read().result().tobytes().hex()]
print(json.dumps(found))
"""


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Any:
    if importlib.util.find_spec("s3_rig") is None:
        pytest.skip("tests/s3_rig.py, which starts an S3 server, is not there")
    return request.getfixturevalue("seaweed")


@pytest.mark.slow
def test_a_generation_on_s3_is_read_without_ckptfmt(tmp_path: Path, server: Any, quick: None) -> None:
    from s3_rig import KEY, SECRET

    state = {
        "w": np.random.default_rng(0).standard_normal((50_257, 50)).astype(np.float32),
        "odd/name": np.arange(10).astype(ml_dtypes.bfloat16),
    }
    generation = ckptfmt.save(state, tmp_path / "r")
    report = export_ocdbt(generation._opened)
    assert report.copied_nbytes
    bucket, _, prefix = server.new_root().partition("/")
    target = {
        "driver": "s3",
        "bucket": bucket,
        "path": f"{prefix}/{generation._opened.folder}/",
        "endpoint": server.endpoint,
        "aws_region": "us-east-1",
        "aws_credentials": {"type": "environment"},
    }
    folder = tmp_path / "r" / generation._opened.folder
    done = subprocess.run(
        [sys.executable, "-c", COPY_AND_READ, str(folder), json.dumps(target), "w", "odd%2Fname"],
        env=os.environ | {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for node, name in (("w", "w"), ("odd%2Fname", "odd/name")):
        dtype, shape, data = found[node]
        assert (dtype, tuple(shape)) == (generation[name].dtype, generation[name].shape)
        assert bytes.fromhex(data) == state[name].tobytes()
