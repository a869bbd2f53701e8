"""The catalog's database: schema, checks, backup."""

from __future__ import annotations

from typing import Annotated

import typer

from ckptfmt.cli import options

Target = Annotated[
    str, typer.Argument(metavar="URL", help="A repository with an embedded catalog, or a catalog: sqlite:////path.")
]
NewFile = Annotated[str, typer.Argument(metavar="FILE", help="A new file on a local disk.")]


def upgrade(url: Target, catalog: options.Catalog = None, as_json: options.Json = False) -> None:
    """Bring the schema to the revision of this ckptfmt. Take a backup first."""
    from ckptfmt.cli import database

    database.upgrade(url, catalog, as_json)


def current(url: Target, catalog: options.Catalog = None, as_json: options.Json = False) -> None:
    """Show the schema's revision, and the one that this ckptfmt needs."""
    from ckptfmt.cli import database

    database.current(url, catalog, as_json)


def check(url: Target, catalog: options.Catalog = None, as_json: options.Json = False) -> int:
    """Compare the database with what this ckptfmt expects; exit code 15 if anything is wrong."""
    from ckptfmt.cli import database

    return database.check(url, catalog, as_json)


def backup(url: Target, file: NewFile, catalog: options.Catalog = None, as_json: options.Json = False) -> None:
    """Copy the database into a new file, whole even while others write."""
    from pathlib import Path

    from ckptfmt.cli import database

    database.backup(url, Path(file), catalog, as_json)
