"""What an import costs, and that nothing is imported under a name that users may have taken."""

import json
import subprocess
import sys

import pytest


def modules_after(code: str) -> set[str]:
    """Names in sys.modules of a fresh interpreter after ``code``."""
    report = "import sys, json; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-W", "error", "-c", f"{code}\n{report}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_ckptfmt_loads_nothing_heavy() -> None:
    loaded = modules_after("import ckptfmt")
    heavy = {"numpy", "torch", "sqlalchemy", "alembic", "msgspec", "zstandard", "xxhash", "fsspec", "typer", "rich"}
    assert not loaded & heavy
    assert not loaded & {"zarr", "tensorstore", "ml_dtypes", "dask", "xarray"}
    assert {name for name in loaded if name.startswith("ckptfmt")} == {"ckptfmt"}


def test_every_public_name_is_there_on_demand() -> None:
    code = "import ckptfmt\nfor name in ckptfmt.__all__: getattr(ckptfmt, name)"
    loaded = modules_after(code)
    assert "torch" not in loaded
    assert "sqlalchemy" not in loaded
    assert "zarr" not in loaded


@pytest.mark.parametrize("arguments", [["--help"], ["ls", "--help"]])
def test_the_command_line_helps_without_heavy_imports(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        f"sys.argv = ['ckptfmt', *{arguments!r}]\n"
        "from ckptfmt.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as stop: assert not stop.code, stop.code"
    )
    assert not modules_after(code) & {"torch", "numpy", "sqlalchemy", "alembic"}


@pytest.mark.slow
def test_no_room_answers_to_a_bare_name() -> None:
    """``catalog``, ``backends`` and ``migrations`` belong to users; ours are ckptfmt.catalog and so on."""
    code = (
        "import importlib, pkgutil, ckptfmt\n"
        "names = [item.name for item in pkgutil.walk_packages(ckptfmt.__path__, 'ckptfmt.')]\n"
        # Alembic's environment script and the modules that run a program do their work when imported.
        "skip = ('ckptfmt.migrations.env',)\n"
        "for name in names:\n"
        "    if name not in skip and not name.endswith('__main__'): importlib.import_module(name)\n"
        "assert 'ckptfmt.catalog.schema' in names and 'ckptfmt.backends.posix' in names"
    )
    loaded = modules_after(code)
    assert "ckptfmt.catalog" in loaded
    assert not loaded & {"catalog", "backends", "migrations"}
