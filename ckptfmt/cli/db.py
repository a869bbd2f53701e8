"""Look after the catalog's database: schema, checks, backup."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from ckptfmt.cli import options

_VERBS = {
    "upgrade": "bring the schema to the revision of this ckptfmt; take a backup first",
    "current": "show the schema's revision, and the one that this ckptfmt needs",
    "check": "compare the database with what this ckptfmt expects; exit code 15 if anything is wrong",
    "backup": "copy the database into a new file, whole even while others write",
}


def configure(parser: ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="db_verb", metavar="VERB", required=True)
    for name, help_text in _VERBS.items():
        verb = verbs.add_parser(name, help=help_text, description=f"{help_text[0].upper()}{help_text[1:]}.")
        verb.add_argument(
            "url", metavar="URL", help="a repository with an embedded catalog, or a catalog: sqlite:////path"
        )
        if name == "backup":
            verb.add_argument("file", metavar="FILE", help="a new file on a local disk")
        options.add_catalog(verb)
        options.add_output(verb)


def run(arguments: Namespace) -> int:
    from ckptfmt.cli import database

    target = database.catalog_of(arguments.url, arguments.catalog)
    if arguments.db_verb == "upgrade":
        return database.upgrade(target, arguments.as_json)
    if arguments.db_verb == "current":
        return database.current(target, arguments.as_json)
    if arguments.db_verb == "check":
        return database.check(target, arguments.as_json)
    return database.backup(target, Path(arguments.file), arguments.as_json)
