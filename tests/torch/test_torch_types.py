"""torch's small value types in the state tree."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from ckptfmt.errors import CkptError
from ckptfmt.format import tree

VALUES = [
    torch.Size([2, 3]),
    torch.Size([]),
    torch.device("cpu"),
    torch.device("cuda:3"),
    torch.device("meta"),
    torch.float32,
    torch.qint8,
    torch.bits8,
    torch.channels_last,
    torch.preserve_format,
    torch.strided,
    torch.sparse_coo,
]


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_values_come_back_as_what_they_were(archive: Any, value: Any) -> None:
    back = archive.round_trip({"x": [value]})["x"][0]
    assert type(back) is type(value)
    assert back == value


def test_every_dtype_is_a_value(archive: Any) -> None:
    every = [found for found in vars(torch).values() if isinstance(found, torch.dtype)]
    assert archive.round_trip(every) == every


@pytest.mark.parametrize(
    "node",
    [
        {"torch.dtype": "float31"},
        {"torch.dtype": "Tensor"},
        {"torch.dtype": 3},
        {"torch.device": "nowhere"},
        {"torch.Size": "ab"},
    ],
)
def test_words_that_torch_lacks_are_refused(archive: Any, node: Any) -> None:
    ((tag, _),) = node.items()
    with pytest.raises(CkptError, match=tag):
        archive.decode(json.dumps(node))


def test_a_reader_without_torch_sees_what_is_stored(archive: Any) -> None:
    text = archive.encode({"shape": torch.Size([2]), "dtype": torch.float16})
    code = (
        "import json, sys; from ckptfmt.format import tree\n"
        f"value = tree.decode(json.loads({text!r}), None, lenient=True)\n"
        "assert 'torch' not in sys.modules; print(value)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "torch.Size" in done.stdout
    assert "float16" in done.stdout


def test_registering_again_is_harmless() -> None:
    from ckptfmt.torch import types

    types.register()
    types.register()
    assert tree.encode(torch.float32, lambda path, value: None) == {"torch.dtype": "float32"}
