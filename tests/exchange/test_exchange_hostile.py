"""Files that somebody made to do harm, or that were damaged: nothing but the errors of ckptfmt, and no code is run."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import pickletools
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exchange_fixtures import save_dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from ckptfmt.errors import CkptError, Corrupt, FormatError, NotFound
from ckptfmt.exchange import dcp_metadata
from ckptfmt.exchange.dcp_metadata import parse_metadata
from ckptfmt.exchange.foreign import open_foreign
from ckptfmt.exchange.foreign_dcp import nested
from ckptfmt.exchange.weight_map import parse_index


# -- the pickle of DCP --------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    state = {"m": {"w": torch.ones(4, 3), "b": torch.zeros(2, dtype=torch.bfloat16)}, "l": [torch.ones(1), 7], "s": 3}
    return save_dcp(state, tmp_path_factory.mktemp("hostile") / "dcp")


@pytest.fixture(scope="module")
def real(directory: Path) -> bytes:
    return (directory / ".metadata").read_bytes()


def test_real_metadata_is_read(real: bytes) -> None:
    found = parse_metadata(real, "it")
    assert {name: (one.dtype, one.shape) for name, one in found.tensors.items()} == {
        "m.w": ("float32", (4, 3)),
        "m.b": ("bfloat16", (2,)),
        "l.0": ("float32", (1,)),
    }
    assert set(found.values) == {"l.1", "s"}
    assert found.paths["l.1"] == ("l", 1)


class Runs:
    """Its pickle calls something."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


@pytest.mark.parametrize(
    "function",
    [os.system, eval, exec, getattr, open, __import__, print, torch.load, pickle.loads, os.mkdir, type, object],
)
def test_no_function_is_called(function: Callable[..., Any], tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    data = pickle.dumps(Runs(function, f"touch {mark}"))
    with pytest.raises(FormatError, match=f"names .*{function.__name__}"):
        parse_metadata(data, "it")
    assert not mark.exists()


def global_(module: str, name: str) -> bytes:
    return b"c" + module.encode() + b"\n" + name.encode() + b"\n"


_META = "torch.distributed.checkpoint.metadata"
SIZE, INFO = global_("torch", "Size"), global_(_META, "Metadata")
CRAFTED = {
    "a path through an allowed module": b"\x80\x04\x8c\x05torch\x8c\x0dhub.load_file\x93.",
    "an attribute of an allowed name": b"\x80\x04\x8c\x05torch\x8c\x0dSize.__init__\x93.",
    "another name of an allowed module": global_("torch", "load") + b".",
    "a real class instead of a stand-in": global_("collections", "Counter") + b".",
    "an object outside of the file": b"Pabc\n.",
    "an object outside of the file, binary": b"\x8c\x01aQ.",
    "an extension": b"\x82\x01.",
    "a memo of four billion": b"\x80\x02]r\xff\xff\xff\xff.",
    "a text of eight exabytes": b"\x80\x04\x8d" + b"\xff" * 8 + b".",
    "an int of two gigabytes": b"\x80\x02\x8b\xff\xff\xff\x7f.",
    "a bytearray of eight exabytes": b"\x80\x05\x96" + b"\xff" * 7 + b"\x7f.",
    "a frame of eight exabytes": b"\x80\x04\x95" + b"\xff" * 8 + b".",
    "a buffer out of band": b"\x80\x05\x97.",
    "attributes of a stand-in class": INFO + b"(}(\x8c\x0c__setstate__K\x01ut" + b"b.",
    "a class built like an instance": INFO + b"N}\x8c\x05stateK\x01s\x86b.",
    "a call of an instance": INFO + b")R)R.",
    "items for what takes none": INFO + b")R(K\x01K\x02u.",
    "nothing": b"",
    "no end": b"\x80\x04]",
    "an end too early": b".",
    "a number": b"K\x01.",
    "a tuple of itself": b"]q\x00h\x00a.",
    "ten thousand lists in another": b"]" * 10_000 + b"a" * 9_999 + b".",
}


@pytest.mark.parametrize("data", CRAFTED.values(), ids=CRAFTED.keys())
def test_crafted_pickles_are_refused(data: bytes) -> None:
    with pytest.raises(FormatError, match=r"^it"):
        parse_metadata(data, "it")


def test_what_one_file_does_to_its_names_ends_with_it(real: bytes) -> None:
    with pytest.raises(FormatError):
        parse_metadata(CRAFTED["a class built like an instance"], "it")
    assert parse_metadata(real, "it").tensors


def rebuilt(real: bytes, change: Callable[[Any], None]) -> bytes:
    """The metadata with something changed, as torch would pickle it."""
    found = pickle.loads(real)
    change(found)
    return pickle.dumps(found)


def _set(container: Any, key: Any, **fields: Any) -> None:
    for name, value in fields.items():
        object.__setattr__(container[key], name, value)


def _first_chunk(found: Any, **fields: Any) -> None:
    _set(found.state_dict_metadata["m.w"].chunks, 0, **{k: torch.Size(v) for k, v in fields.items()})


def _no_storage(found: Any) -> None:
    found.storage_data.clear()


def _transformed(found: Any) -> None:
    _set(found.storage_data, next(iter(found.storage_data)), transform_descriptors=["zstd"])


def _negative(found: Any) -> None:
    _set(found.storage_data, next(iter(found.storage_data)), offset=-1)


def _twice(found: Any) -> None:
    found.state_dict_metadata["m.w"].chunks.append(found.state_dict_metadata["m.w"].chunks[0])
    found.state_dict_metadata["m.w"].size = torch.Size((8, 3))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda found: _first_chunk(found, sizes=(3, 3)), "'m.w' is not whole"),
        (lambda found: _first_chunk(found, offsets=(1, 0)), "does not tell in which file 'm.w'"),
        (lambda found: _first_chunk(found, sizes=(4,)), "'m.w' is not whole"),
        (_no_storage, "does not tell in which file"),
        (_transformed, "written through"),
        (_negative, "no number of bytes"),
        (_twice, "'m.w' is not whole"),
    ],
)
def test_metadata_that_contradicts_itself(real: bytes, change: Callable[[Any], None], told: str) -> None:
    with pytest.raises(FormatError, match=told):
        parse_metadata(rebuilt(real, change), "it")


def test_one_list_in_many_tensors_is_counted_for_each(real: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcp_metadata, "CHUNKS_MAX", 5)

    def many(found: Any) -> None:
        for number in range(9):
            found.state_dict_metadata[f"t{number}"] = found.state_dict_metadata["m.w"]

    with pytest.raises(FormatError, match=r"more than 5 chunks|which file"):
        parse_metadata(rebuilt(real, many), "it")


def _answer(data: bytes) -> None:
    told = ""
    try:
        parse_metadata(data, "it")
    except FormatError as error:
        told = str(error)
    assert not told or told.startswith("it")


_ANY = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@_ANY
@given(st.binary(max_size=200))
def test_any_bytes_end_in_a_format_error(data: bytes) -> None:
    _answer(data)


@_ANY
@given(st.data())
def test_changed_metadata_ends_in_a_format_error_or_is_read(real: bytes, data: st.DataObject) -> None:
    text = bytearray(real)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    _answer(bytes(text))


_OPCODES = [op.code.encode("latin-1") for op in pickletools.opcodes]


@_ANY
@given(st.lists(st.sampled_from([*_OPCODES, SIZE, INFO, b"\x8c\x01a", b"K\x01", b")", b"}", b"]", b"("]), max_size=40))
def test_any_opcodes_end_in_a_format_error(parts: list[bytes]) -> None:
    _answer(b"".join(parts) + b".")


def test_items_outside_of_their_files(directory: Path, real: bytes, tmp_path: Path) -> None:
    def moved(**fields: Any) -> Path:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()

        def change(found: Any) -> None:
            for index in found.storage_data:
                _set(found.storage_data, index, **fields)

        (folder / ".metadata").write_bytes(rebuilt(real, change))
        (folder / "__0_0.distcp").write_bytes((directory / "__0_0.distcp").read_bytes())
        return folder

    for name in ("../secret", "/etc/passwd", "..", "", "a/b", "a\\b", "a\0b"):
        with pytest.raises(FormatError, match="no plain file name"):
            open_foreign(moved(relative_path=name))
    with pytest.raises(NotFound):
        open_foreign(moved(relative_path="__9_9.distcp"))
    with pytest.raises(Corrupt, match="cut short"):
        open_foreign(moved(length=1 << 40))
    with open_foreign(moved(offset=0, length=100)) as foreign, pytest.raises(FormatError, match=r"'m\.w' in __0_0"):
        list(foreign.tensors["m.w"].pieces())


def test_an_item_that_is_another_tensor_than_told(directory: Path, real: bytes, tmp_path: Path) -> None:
    def swap(found: Any) -> None:
        infos = {index.fqn: info for index, info in found.storage_data.items()}
        for index in found.storage_data:
            if index.fqn == "m.w":
                found.storage_data[index] = infos["m.b"]

    (tmp_path / ".metadata").write_bytes(rebuilt(real, swap))
    (tmp_path / "__0_0.distcp").write_bytes((directory / "__0_0.distcp").read_bytes())
    with open_foreign(tmp_path) as foreign, pytest.raises(Corrupt, match=r"is bfloat16 \[2\]; the metadata tells"):
        list(foreign.tensors["m.w"].pieces())


@given(
    st.dictionaries(st.lists(st.one_of(st.integers(-1, 3), st.sampled_from("ab")), max_size=3).map(tuple), st.none())
)
def test_paths_are_put_back_or_refused(flat: dict[tuple[str | int, ...], None]) -> None:
    try:
        nested(flat)
    except FormatError:
        assert any(one != other and other[: len(one)] == one for one in flat for other in flat)


# -- safetensors --------------------------------------------------------------------------------------
def raw(header: str, data: bytes = b"") -> bytes:
    text = header.encode()
    return struct.pack("<Q", len(text)) + text + data


ONE = '"w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}'
WRONG = {
    "no header": b"",
    "half a length": b"\1\0\0",
    "a header of exabytes": b"\xff" * 7 + b"\x7f{}",
    "a header beyond the end": struct.pack("<Q", 100) + b"{}",
    "no object": raw("[]"),
    "not JSON": raw("{,}"),
    "a name twice": raw("{" + ONE + ", " + ONE + "}", b"abcd"),
    "a hole": raw('{"w": {"dtype": "U8", "shape": [4], "data_offsets": [2, 6]}}', b"abcdef"),
    "an overlap": raw("{" + ONE + ', "v": {"dtype": "U8", "shape": [4], "data_offsets": [2, 6]}}', b"abcdef"),
    "a wrong size": raw('{"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 4]}}', b"abcd"),
    "a negative shape": raw('{"w": {"dtype": "U8", "shape": [-2, -2], "data_offsets": [0, 4]}}', b"abcd"),
    "an unknown type": raw('{"w": {"dtype": "F3", "shape": [4], "data_offsets": [0, 4]}}', b"abcd"),
    "cut short": raw("{" + ONE + "}", b"abc"),
    "too long": raw("{" + ONE + "}", b"abcde"),
    "metadata of numbers": raw('{"__metadata__": {"a": 1}, ' + ONE + "}", b"abcd"),
    "a place that is no number": raw('{"__metadata__": {"DCP_SHARDING_INFO": "{\\"w\\": 3}"}, ' + ONE + "}", b"abcd"),
    "a place of other dimensions": raw(
        '{"__metadata__": {"DCP_SHARDING_INFO": "{\\"w\\": {\\"saved_offsets\\": [0, 0]}}"}, ' + ONE + "}", b"abcd"
    ),
    "a part of a tensor": raw(
        '{"__metadata__": {"DCP_SHARDING_INFO": "{\\"w\\": {\\"saved_offsets\\": [4]}}"}, ' + ONE + "}", b"abcd"
    ),
}


@pytest.mark.parametrize("data", WRONG.values(), ids=WRONG.keys())
def test_wrong_safetensors_files(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(data)
    with pytest.raises(FormatError, match=r"w\.safetensors|'w'"):
        open_foreign(tmp_path / "w.safetensors")


@_ANY
@given(st.binary(max_size=120))
def test_any_file_ends_in_an_error_of_ours(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    for text in (data, struct.pack("<Q", max(0, len(data) - 8)) + b"{" + data):
        path.write_bytes(text)
        with contextlib.suppress(FormatError):
            open_foreign(path).close()


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "..", "", "sub/model.safetensors", "a\\b"])
def test_an_index_that_leads_out_of_its_folder(name: str, tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(FormatError, match=r"tensor 'w' does not lie in a file beside it"):
        open_foreign(folder)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{}",
        b'{"weight_map": []}',
        b'{"weight_map": {"w": 1}}',
        b'{"weight_map": {"w": "a", "w": "b"}}',
        b"\xff",
    ],
)
def test_an_index_that_is_none(text: bytes) -> None:
    with pytest.raises(FormatError, match=r"^it"):
        parse_index(text, "it")


def test_an_index_against_its_files(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "a.safetensors")
    save_file({"w": torch.zeros(2), "v": torch.ones(1)}, tmp_path / "b.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "a.safetensors", "x": "a.safetensors"}}))
    with pytest.raises(FormatError, match=r"places tensor 'x' in a\.safetensors, which does not have it"):
        open_foreign(tmp_path)
    index.write_text(json.dumps({"weight_map": {"w": "a.safetensors", "v": "b.safetensors"}}))
    with pytest.raises(FormatError, match=r"'w' stands in a\.safetensors and in b\.safetensors"):
        open_foreign(tmp_path)
    index.write_text(json.dumps({"weight_map": {"w": "c.safetensors"}}))
    with pytest.raises(NotFound, match=r"c\.safetensors"):
        open_foreign(tmp_path)
    index.unlink()
    with pytest.raises(FormatError, match=r"'w' stands in a\.safetensors and in b\.safetensors"):
        open_foreign(tmp_path)


# -- torch.save, and what is no file at all -----------------------------------------------------------
def test_damaged_files_of_torch_save(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save({"w": torch.arange(1000)}, buffer)
    whole = buffer.getvalue()
    old = io.BytesIO()
    torch.save({"w": torch.arange(1000)}, old, _use_new_zipfile_serialization=False)
    cut = [
        whole[:-20],
        whole[: len(whole) // 2],
        whole[:4],
        old.getvalue()[:-20],
        old.getvalue()[:40],
        b"",
        b"\x80\x02K\x01.",
    ]
    for number, data in enumerate(cut):
        path = tmp_path / f"{number}.pt"
        path.write_bytes(data)
        with pytest.raises(FormatError, match=rf"{number}\.pt is not what torch\.save writes"):
            open_foreign(path)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "w.safetensors")
    with pytest.raises(CkptError, match="no regular file"):
        open_foreign(tmp_path / "w.safetensors")
