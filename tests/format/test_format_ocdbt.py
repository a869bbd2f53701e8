"""OCDBT databases as the installed TensorStore reads them: the format's own description calls it experimental."""

from __future__ import annotations

import random
from typing import Any

import pytest
import tensorstore
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfmt.errors import InvalidInput
from ckptfmt.format import ocdbt
from ckptfmt.format.crc32c import crc32c

UUID = bytes(range(16))
PACKS = {"r00000-p000.safetensors": random.Random(0).randbytes(5000), "r00001-p000.safetensors": b"x" * 5000}


class Read:
    """A database in memory, opened by TensorStore."""

    def __init__(self, values: dict[str, ocdbt.Value]) -> None:
        shuffled = random.Random(1).sample(sorted(values.items()), len(values))
        self.database = ocdbt.encode_database(shuffled, nodes_file="x.nodes", uuid=UUID, committed_ns=5)
        self._context = tensorstore.Context()
        self._place = tensorstore.KvStore.open("memory://", context=self._context).result()
        files = {"x.nodes": self.database.nodes, ocdbt.MANIFEST: self.database.manifest, **PACKS}
        for name, data in files.items():
            self.put(name, data)

    def put(self, name: str, data: bytes) -> None:
        self._place.write(name, data).result()

    def opened(self) -> Any:
        return tensorstore.KvStore.open({"driver": "ocdbt", "base": "memory://"}, context=self._context).result()


def expected(value: ocdbt.Value) -> bytes:
    return value if isinstance(value, bytes) else PACKS[value.file][value.offset : value.offset + value.nbytes]


def many(count: int) -> dict[str, ocdbt.Value]:
    files = sorted(PACKS)
    return {
        f"layer.{at // 100}.weight/c/{at % 100}": b"inline %d" % at
        if at % 7 == 0
        else ocdbt.Range(files[at % 2], at % 4000, at % 300)
        for at in range(count)
    }


def test_the_checksum_is_the_published_one() -> None:
    assert crc32c(b"") == 0
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA


@pytest.mark.parametrize("count", [1, 2, 2048, 2049, 4097], ids=str)
def test_all_keys_are_listed_and_read(count: int) -> None:
    values = many(count)
    store = Read(values).opened()
    assert sorted(store.list().result()) == sorted(key.encode() for key in values)
    for key in random.Random(2).sample(sorted(values), min(count, 300)):
        assert store.read(key).result().value == expected(values[key]), key
    assert store.read("layer").result().state == "missing"


@given(
    st.dictionaries(
        st.text(st.sampled_from("ab/."), max_size=8) | st.text(max_size=4),
        st.binary(max_size=40)
        | st.builds(ocdbt.Range, st.sampled_from(sorted(PACKS)), st.integers(0, 4000), st.integers(0, 1000)),
        min_size=1,
        max_size=30,
    ),
    st.sampled_from([2, 3, 2048]),
)
@settings(max_examples=150, deadline=None)
def test_any_keys_in_trees_of_any_height(values: dict[str, ocdbt.Value], entries: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ocdbt, "_NODE_ENTRIES", entries)
        store = Read(values).opened()
    assert sorted(store.list().result()) == sorted(key.encode() for key in values)
    for key, value in values.items():
        assert store.read(key).result().value == expected(value), key


def test_large_values_end_a_leaf_early() -> None:
    values: dict[str, ocdbt.Value] = {f"{at}": bytes([at]) * 300_000 for at in range(10)}
    read = Read(values)
    assert all(read.opened().read(key).result().value == value for key, value in values.items())
    assert len(read.database.nodes) > 3_000_000


@pytest.mark.parametrize("name", ["x.nodes", ocdbt.MANIFEST])
def test_damage_of_the_database_itself_is_told_by_its_readers(name: str) -> None:
    read = Read(many(300))
    data = bytearray(read.database.nodes if name == "x.nodes" else read.database.manifest)
    data[len(data) // 2] ^= 1
    read.put(name, bytes(data))
    with pytest.raises(ValueError, match="CRC-32C"):
        read.opened().read("layer.1.weight/c/3").result()


def test_what_has_no_room_is_refused() -> None:
    for values in [("k" * 70_000, b"")], [("k", bytes((1 << 20) + 1))], []:
        with pytest.raises(InvalidInput, match=r"OCDBT|1 MiB"):
            ocdbt.encode_database(values, nodes_file="x", uuid=UUID)  # type: ignore[arg-type]


@pytest.mark.long
def test_300_000_keys() -> None:
    values = many(300_000)
    store = Read(values).opened()
    assert len(store.list().result()) == len(values)
    for key in random.Random(2).sample(sorted(values), 2000):
        assert store.read(key).result().value == expected(values[key]), key
