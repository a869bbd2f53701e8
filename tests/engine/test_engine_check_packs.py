"""Packs are looked for by one listing where they are many, with the same answer as one by one."""

from __future__ import annotations

import re
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from ckptfmt.backends.memory import MemoryBackend
from ckptfmt.engine import protocol
from ckptfmt.engine.protocol import check_packs
from ckptfmt.errors import AccessDenied, Corrupt, NotFound
from ckptfmt.format.tables import PackRow

KEY, OTHER = "a" * 32, "b" * 32
FOLDER = f"runs/r/{KEY}"
FEW, MANY = 3, protocol._LISTED_FROM


class CountedBackend(MemoryBackend):
    def __init__(self, name: str, *, may_list: bool) -> None:
        super().__init__(re.sub("[^a-zA-Z0-9]", "-", name))
        self.asked: Counter[str] = Counter()
        self._may_list = may_list

    def head(self, key: str) -> Any:
        self.asked["head"] += 1
        return super().head(key)

    def list(self, prefix: str) -> Any:
        self.asked["list"] += 1
        if not self._may_list:
            raise AccessDenied("listing is not allowed")
        return super().list(prefix)


def pack(number: int, generation: str | None = None) -> PackRow:
    return PackRow(
        name=f"p{number:03d}", rank=0, nbytes=5, header_bytes=1, header_digest="0" * 32, generation=generation
    )


def site_of(name: str, *, may_list: bool = True) -> tuple[Any, CountedBackend]:
    backend = CountedBackend(name, may_list=may_list)
    return SimpleNamespace(backend=backend), backend


def put(backend: CountedBackend, packs: list[PackRow], bytes_of: dict[int, bytes | None]) -> None:
    for folder in (FOLDER, f"runs/r/{OTHER}"):
        backend.make_folder(folder)
    for number, one in enumerate(packs):
        data = bytes_of.get(number, b"12345")
        if data is not None:
            backend.create(f"runs/r/{one.generation or KEY}/{one.name}", data)


@pytest.mark.parametrize("count", [FEW, MANY])
@pytest.mark.parametrize("may_list", [True, False])
def test_what_is_gone_or_short_is_named(request: pytest.FixtureRequest, count: int, may_list: bool) -> None:
    site, backend = site_of(request.node.name, may_list=may_list)
    packs = [pack(number) for number in range(count)]
    manifest: Any = SimpleNamespace(packs=packs, id=3, run="run")
    put(backend, packs, {})
    check_packs(site, FOLDER, manifest)
    by_listing = count == MANY and may_list
    assert backend.asked["head"] == (0 if by_listing else count)

    site, backend = site_of(f"{request.node.name}-gone", may_list=may_list)
    put(backend, packs, {1: None, 2: b"123"})
    with pytest.raises(NotFound, match=rf"pack {FOLDER}/p001 .*; also damaged or gone: {FOLDER}/p002"):
        check_packs(site, FOLDER, manifest)

    site, backend = site_of(f"{request.node.name}-short", may_list=may_list)
    put(backend, packs, {2: b"123456"})
    with pytest.raises(Corrupt, match=r"p002 of generation 3 .* has 6 bytes, recorded are 5"):
        check_packs(site, FOLDER, manifest)
    assert backend.asked["list"] == (1 if count == MANY else 0)


def test_packs_of_another_generation_are_looked_at_there(request: pytest.FixtureRequest) -> None:
    site, backend = site_of(request.node.name)
    packs = [pack(number, OTHER if number % 8 == 0 else None) for number in range(MANY)]
    put(backend, packs, {})
    check_packs(site, FOLDER, SimpleNamespace(packs=packs, id=3, run="run"))  # type: ignore[arg-type]
    assert backend.asked == {"list": 1, "head": MANY // 8}
    backend.delete(f"runs/r/{OTHER}/p008")
    backend.create(f"{FOLDER}/p008", b"12345")
    with pytest.raises(NotFound, match=f"{OTHER}/p008"):
        check_packs(site, FOLDER, SimpleNamespace(packs=packs, id=3, run="run"))  # type: ignore[arg-type]
