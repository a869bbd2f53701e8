"""The SQLite catalog against the suite that every SQL catalog passes."""

from __future__ import annotations

from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from ckptfmt.testing.catalog_machine import CatalogMachine
from ckptfmt.testing.catalogs import CatalogConformance, MakeCatalog


class TestSqliteCatalog(CatalogConformance):
    """All cases of the suite."""


def test_random_sequences_equal_the_model(make_catalog: MakeCatalog, database: Path) -> None:
    shared = make_catalog()

    class Machine(CatalogMachine):
        catalog = shared

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=6,
            stateful_step_count=20,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
