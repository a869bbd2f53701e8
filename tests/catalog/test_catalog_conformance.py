"""The SQLite catalog against the suite that every SQL catalog passes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptfmt.errors import Conflict
from ckptfmt.ports.records import LaunchRequest
from ckptfmt.testing.catalog_machine import check_random_sequences
from ckptfmt.testing.catalogs import CatalogConformance, Job, MakeCatalog, request


class TestSqliteCatalog(CatalogConformance):
    """All cases of the suite."""


def test_random_sequences_equal_the_model(make_catalog: MakeCatalog) -> None:
    check_random_sequences(make_catalog(), sequences=6, steps=20)


@pytest.mark.parametrize(
    "other",
    [
        request("node2", 7, world_size=2),
        replace(request("node1", 7, world_size=2), boot_id="another"),
        replace(request("node2", 7, world_size=2), boot_id=""),
    ],
)
def test_ranks_of_another_host_are_told_to_use_postgresql(make_catalog: MakeCatalog, other: LaunchRequest) -> None:
    catalog = make_catalog()
    job = Job.start(catalog, world_size=2)
    with pytest.raises(Conflict, match=r"one host.*PostgreSQL") as refused:
        catalog.join_launch("llama", replace(other, token=job.launch.token), rank=1)
    assert refused.value.kind == "one_host"
    container = replace(request("node2", 7, world_size=2), token=job.launch.token, boot_id=job.launch.boot_id)
    assert catalog.join_launch("llama", container, rank=1) == job.launch
