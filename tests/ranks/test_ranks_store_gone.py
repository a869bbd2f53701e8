"""A follower whose board is gone looks for the verdict in the catalog by itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from ckptfmt.engine.save.context import Ranks
from ckptfmt.engine.save.messages import Messages
from ckptfmt.errors import CatalogError
from ckptfmt.format.states import State
from ckptfmt.ports.coordination import STORE_GONE


class GoneBoard:
    pause = 0.01

    def post(self, *_: object) -> NoReturn:
        raise CatalogError("the store is gone", kind=STORE_GONE)

    peek = complete = forget = post


@pytest.mark.parametrize(
    ("state", "told"), [("writing", False), ("durable", False), ("committed", True), ("aborted", True)]
)
def test_without_its_board_a_rank_finds_the_verdict_in_the_catalog(state: str, told: bool) -> None:
    row: Any = SimpleNamespace(id=7, run="run", step=1, save_number=0, state=State(state))
    catalog: Any = SimpleNamespace(generation={7: row}.get)
    launch: Any = SimpleNamespace(id=1)
    coordination = Messages(catalog, launch, Ranks(1, 2, (0, 1)), GoneBoard())
    assert not coordination.settles
    assert coordination.verdict(row) is (row if told else None)
    assert coordination.look(row) is row
    assert coordination.settles
