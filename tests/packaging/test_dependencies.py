"""What is declared is what is imported."""

import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

EXTRAS = (
    "torch",
    "postgres",
    "s3",
    "gcs",
    "azure",
    "zarr",
    "tensorstore",
    "lightning",
    "transformers",
    "accelerate",
)


def plain(requirement: str) -> str:
    """``ml_dtypes>=0.5`` -> ``ml-dtypes``, as names are compared."""
    name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.slow
def test_every_dependency_is_imported_and_every_import_declared() -> None:
    graph = grimp.build_graph("ckptfmt", include_external_packages=True, cache_dir=None)
    outside = {name for name in graph.modules if not name.startswith("ckptfmt")} - sys.stdlib_module_names
    outside -= {"_typeshed"}  # there for type checkers only
    homes = importlib.metadata.packages_distributions()
    # ckptfmt.testing is imported by the tests of those who write backends and catalogs; pytest brought them there.
    needed = {
        name
        for name in outside
        if any(not room.startswith("ckptfmt.testing") for room in graph.find_modules_that_directly_import(name))
    }
    imported = {plain(homes[name][0]) for name in needed}
    optional = {
        plain(line)
        for extra in EXTRAS
        for line in PROJECT["optional-dependencies"][extra]
        if plain(line) != "ckptfmt"  # an extra of ours that it builds on
    }
    assert imported == {plain(line) for line in PROJECT["dependencies"]} | optional


def test_constraints_pin_everything_once() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line) for line in lines), "pin name==version only"
    pinned = [plain(line) for line in lines]
    assert len(set(pinned)) == len(pinned)
    declared = [
        *PROJECT["dependencies"],
        *(line for extra in PROJECT["optional-dependencies"].values() for line in extra),
    ]
    assert {plain(line) for line in declared} - {"ckptfmt"} <= set(pinned)


def test_the_version_is_said_once() -> None:
    import ckptfmt

    assert "version" in PROJECT["dynamic"]
    assert importlib.metadata.version("ckptfmt") == ckptfmt.__version__
