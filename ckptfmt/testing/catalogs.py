"""Conformance of a SQL catalog.

A catalog joins in some twenty lines: subclass ``CatalogConformance`` in a test file and provide two fixtures,

- ``make_catalog``: a ``MakeCatalog`` on a database that is new for each test;
- ``raw``: a ``RawSql`` on the same database that does not go through the catalog under test.

``check_random_sequences`` (``ckptfmt.testing.catalog_machine``, needs hypothesis) adds a comparison with a model.
"""

from __future__ import annotations

from ckptfmt.ports.catalog import Catalog
from ckptfmt.testing.catalog_job import COPY, OTHER_REPOSITORY, REPOSITORY, Job, MakeCatalog, RawSql, request
from ckptfmt.testing.catalog_launches import LaunchCases
from ckptfmt.testing.catalog_ranks import RankCases
from ckptfmt.testing.catalog_reading import ReadingCases
from ckptfmt.testing.catalog_repair import RepairCases
from ckptfmt.testing.catalog_replicas import ReplicaCases
from ckptfmt.testing.catalog_retention import RetentionCases
from ckptfmt.testing.catalog_saves import SaveCases
from ckptfmt.testing.catalog_texts import TextCases
from ckptfmt.testing.catalog_tiers import TierCases
from ckptfmt.testing.catalog_transitions import TransitionCases
from ckptfmt.testing.catalog_views import ViewCases

__all__ = ["COPY", "OTHER_REPOSITORY", "REPOSITORY", "CatalogConformance", "Job", "MakeCatalog", "RawSql", "request"]


class CatalogConformance(
    LaunchCases,
    RankCases,
    SaveCases,
    TransitionCases,
    RetentionCases,
    ReadingCases,
    ViewCases,
    RepairCases,
    TierCases,
    ReplicaCases,
    TextCases,
):
    """Every case, and a check that the suite knows every method of the port."""

    def test_every_method_of_the_port_exists(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        methods = [name for name in vars(Catalog) if not name.startswith("_")]
        assert len(methods) > 30
        assert [name for name in methods if not hasattr(catalog, name)] == []
