"""zarr's own suite for stores, as far as it applies to one that nobody can write to."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.core.buffer import Buffer, cpu, default_buffer_prototype
from zarr.core.sync import sync
from zarr.testing.store import StoreTests

import ckptfmt
from ckptfmt.errors import InvalidInput
from ckptfmt.views.opening import Reading
from ckptfmt.views.zarr_store import GenerationStore

STATE = {
    "foo": np.array([1, 2, 3, 4], np.uint8),
    "foo-bar": np.arange(6, dtype=np.uint8).reshape(2, 3),
    "empty": np.zeros(0, np.uint8),
}
CHUNKS = {"foo/c/0": b"\x01\x02\x03\x04", "foo-bar/c/0/0": bytes(range(6))}

WRITES = (
    "test_set",
    "test_set_not_open",
    "test_set_many",
    "test_set_if_not_exists",
    "test_set_sync",
    "test_delete",
    "test_delete_dir",
    "test_delete_nonexistent_key_does_not_raise",
    "test_delete_sync",
    "test_delete_sync_missing",
    "test_clear",
)
"""Of the suite, not applicable: they write through the store."""
OWN_KEYS = ("test_get_bytes", "test_get_bytes_sync", "test_get_many", "test_get_partial_values", "test_get_sync")
"""Of the suite: they put values under keys that no generation has; below they read what one has."""


@pytest.fixture(scope="module")
def generation(tmp_path_factory: pytest.TempPathFactory) -> ckptfmt.Generation:
    return ckptfmt.save(STATE, tmp_path_factory.mktemp("suite") / "r")


@pytest.mark.parametrize("reading", [Reading(), Reading(mmap=True), Reading(verify=False)], ids=str, scope="class")
class TestGenerationStore(StoreTests[GenerationStore, cpu.Buffer]):
    store_cls = GenerationStore
    buffer_cls = cpu.Buffer

    async def set(self, store: GenerationStore, key: str, value: Buffer) -> None:
        """What the suite wants there has to be there."""
        assert CHUNKS[key] == value.to_bytes()

    async def get(self, store: GenerationStore, key: str) -> Buffer:
        return self.buffer_cls.from_bytes(CHUNKS[key])

    @pytest.fixture
    def store_kwargs(self, generation: ckptfmt.Generation, reading: Reading) -> dict[str, Any]:
        return {"opened": generation._opened, "reading": reading}

    @pytest.fixture
    def store(self, open_kwargs: dict[str, Any]) -> GenerationStore:
        return sync(self.store_cls.open(**open_kwargs))

    @pytest.fixture
    def store_not_open(self, store_kwargs: dict[str, Any]) -> GenerationStore:
        return self.store_cls(**store_kwargs)

    def test_store_repr(self, store: GenerationStore) -> None:
        assert repr(store) == "<GenerationStore of generation 1 of run 'default': 3 arrays>"
        assert str(store).startswith("file:///")

    def test_store_supports_writes(self, store: GenerationStore) -> None:
        assert not store.supports_writes
        assert not store.supports_deletes

    def test_store_supports_listing(self, store: GenerationStore) -> None:
        assert store.supports_listing

    def test_store_supports_partial_writes(self, store: GenerationStore) -> None:
        assert not store.supports_partial_writes

    async def test_serializable_store(self, store: GenerationStore) -> None:
        again = pickle.loads(pickle.dumps(store))
        assert again == store
        assert again.read_only == store.read_only
        found = await again.get("foo/c/0", default_buffer_prototype())
        assert found is not None
        assert found.to_bytes() == CHUNKS["foo/c/0"]

    def test_store_read_only(self, store: GenerationStore) -> None:
        assert store.read_only
        with pytest.raises(AttributeError):
            store.read_only = False  # type: ignore[misc]

    async def test_store_open_read_only(self, open_kwargs: dict[str, Any]) -> None:  # type: ignore[override]
        assert (await self.store_cls.open(**open_kwargs, read_only=True)).read_only
        with pytest.raises(InvalidInput, match="read-only"):
            await self.store_cls.open(**open_kwargs, read_only=False)

    async def test_writing_raises(self, store: GenerationStore) -> None:
        value = self.buffer_cls.from_bytes(b"x")
        for write in (store.set("foo/c/0", value), store.delete("foo/c/0"), store.delete_dir(""), store.clear()):
            with pytest.raises(ValueError, match="does not support writing"):
                await write
        assert store.with_read_only(True) == store

    @pytest.mark.parametrize("key", ["foo/c/0"])
    @pytest.mark.parametrize(
        "byte_range", [None, RangeByteRequest(1, 4), OffsetByteRequest(1), SuffixByteRequest(1), SuffixByteRequest(9)]
    )
    async def test_get(self, store: GenerationStore, key: str, byte_range: ByteRequest | None) -> None:  # type: ignore[override]
        if byte_range == SuffixByteRequest(9):
            found = await store.get(key, default_buffer_prototype(), byte_range)
            assert found is not None
            assert found.to_bytes() == CHUNKS[key]
        else:
            await super().test_get(store, key, CHUNKS[key], byte_range)  # type: ignore[arg-type]

    async def test_get_not_open(self, store_not_open: GenerationStore) -> None:
        assert not store_not_open._is_open
        found = await store_not_open.get("foo/c/0", default_buffer_prototype())
        assert found is not None
        assert found.to_bytes() == CHUNKS["foo/c/0"]

    async def test_get_raises(self, store: GenerationStore) -> None:
        with pytest.raises(TypeError, match=r"Unexpected byte_range, got.*"):
            await store.get("foo/c/0", default_buffer_prototype(), (0, 2))  # type: ignore[arg-type]

    async def test_get_several(self, store: GenerationStore) -> None:
        wanted = [("foo/c/0", RangeByteRequest(0, 2)), ("foo-bar/c/0/0", SuffixByteRequest(2)), ("none/c/0", None)]
        found = await store.get_partial_values(default_buffer_prototype(), wanted)
        assert [None if one is None else one.to_bytes() for one in found] == [b"\x01\x02", b"\x04\x05", None]
        many = {
            key: one async for key, one in store._get_many([(key, default_buffer_prototype(), None) for key in CHUNKS])
        }
        assert {key: one.to_bytes() for key, one in many.items() if one is not None} == CHUNKS

    @pytest.mark.parametrize("key", list(CHUNKS))
    async def test_getsize(self, store: GenerationStore, key: str) -> None:  # type: ignore[override]
        await super().test_getsize(store, key, CHUNKS[key])

    async def test_getsize_prefix(self, store: GenerationStore) -> None:
        assert await store.getsize_prefix("foo-bar/c") == 6

    async def test_exists(self, store: GenerationStore) -> None:
        assert await store.exists("foo/zarr.json")
        assert not await store.exists("foo")

    async def test_is_empty(self, store: GenerationStore) -> None:
        assert not await store.is_empty("")
        assert not await store.is_empty("foo")
        assert await store.is_empty("fo")
        assert await store.is_empty("spam/")

    async def test_list(self, store: GenerationStore) -> None:
        documents = ["zarr.json", *(f"{name}/zarr.json" for name in STATE)]
        assert sorted([key async for key in store.list()]) == sorted([*documents, *CHUNKS])

    @pytest.mark.parametrize(
        "prefix", ["", "f", "foo", "foo/", "foo/c", "foo/c/0", "foo-", "zarr", "empty/", "x", "foo/x"]
    )
    async def test_list_prefix(self, store: GenerationStore, prefix: str) -> None:  # type: ignore[override]
        every = [key async for key in store.list()]
        assert [key async for key in store.list_prefix(prefix)] == [key for key in every if key.startswith(prefix)]

    async def test_list_empty_path(self, store: GenerationStore) -> None:
        assert [key async for key in store.list()] == [key async for key in store.list_prefix("")]

    @pytest.mark.parametrize(
        "folder",
        ["", "foo", "foo/", "foo/c", "foo-bar/c", "foo-bar/c/0", "foo-bar/c/1", "empty", "empty/c", "x", "foo/c/0"],
    )
    async def test_list_dir(self, store: GenerationStore, folder: str) -> None:  # type: ignore[override]
        prefix = f"{folder.rstrip('/')}/" if folder else ""
        expected = {key.removeprefix(prefix).split("/")[0] for key in [key async for key in store.list_prefix(prefix)]}
        found = [name async for name in store.list_dir(folder)]
        assert len(found) == len(set(found))
        assert set(found) == expected

    def test_get_sync_missing(self, store: GenerationStore) -> None:
        assert store.get_sync("nonexistent") is None

    async def test_get_json(self, store: GenerationStore) -> None:
        assert (await store._get_json("foo/zarr.json", prototype=default_buffer_prototype()))["shape"] == [4]
        with pytest.raises(FileNotFoundError):
            await store._get_bytes("nonexistent_key", prototype=default_buffer_prototype())

    def test_get_json_sync(self, store: GenerationStore) -> None:
        assert store._get_json_sync("zarr.json", prototype=default_buffer_prototype())["node_type"] == "group"


for _name in (*WRITES, *OWN_KEYS):
    setattr(TestGenerationStore, _name, None)


def test_every_test_of_the_suite_is_run_or_named(tmp_path: Path) -> None:
    """A newer zarr may ask more of stores."""
    suite: dict[str, Callable[..., Any]] = dict(inspect.getmembers(StoreTests, inspect.isfunction))
    inherited = {"test_store_type", "test_store_eq", "test_store_context_manager", "test_read_only_store_raises"}
    inherited |= {"test_with_read_only_store", "test_getsize_raises"}
    own = {name for name in vars(TestGenerationStore) if name.startswith("test_")}
    assert {name for name in suite if name.startswith("test_")} - own == inherited
