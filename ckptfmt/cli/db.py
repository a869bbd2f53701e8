"""Look after the catalog's database: schema, checks, backup, repair."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Literal

from ckptfmt.cli import options

_VERBS = {
    "upgrade": "bring the schema to the revision of this ckptfmt; take a backup first",
    "current": "show the schema's revision, and the one that this ckptfmt needs",
    "check": "compare the database with what this ckptfmt expects; exit code 15 if anything is wrong",
    "backup": "copy the database into a new file, whole even while others write",
    "rebuild": "make a lost or damaged catalog anew from what storage proves; with --merge: one put back from a copy",
    "adopt": "give a root that was copied elsewhere a catalog of its own, apart from that of the original",
    "hold": "show which runs are under retention hold after a repair; with --clear: take the holds away",
}

_PLACES = {
    "rebuild": ("URL", "a repository (path or URL); its catalog is named by --catalog, unless it is embedded"),
    "adopt": ("URL", "the root that was copied (path or URL)"),
    "hold": ("URL[#RUN]", "a repository (path or URL), or one run of it"),
}
"""What those take that work on a repository, not on a database by itself."""


def configure(parser: ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="db_verb", metavar="VERB", required=True)
    for name, help_text in _VERBS.items():
        verb = verbs.add_parser(name, help=help_text, description=f"{help_text[0].upper()}{help_text[1:]}.")
        metavar, place = _PLACES.get(
            name, ("URL", "a repository with an embedded catalog, or a catalog: sqlite:////path or postgresql://...")
        )
        verb.add_argument("url", metavar=metavar, help=place)
        if name == "backup":
            verb.add_argument("file", metavar="FILE", help="a new file on a local disk")
        if name == "rebuild":
            verb.add_argument(
                "--merge",
                action="store_true",
                help="keep what the catalog knows, and add what storage proves beyond it",
            )
        if name == "hold":
            verb.add_argument("--clear", action="store_true", help="let retention and gc go on")
        options.add_catalog(verb)
        options.add_output(verb)


def run(arguments: Namespace) -> int:
    if arguments.db_verb in ("rebuild", "adopt"):
        from ckptfmt.cli import rebuilt

        how: Literal["rebuild", "merge", "adopt"] = "adopt"
        if arguments.db_verb == "rebuild":
            how = "merge" if arguments.merge else "rebuild"
        return rebuilt.rebuild(arguments.url, arguments.catalog, how, arguments.as_json)
    if arguments.db_verb == "hold":
        return _hold(arguments)
    from ckptfmt.cli import database

    target = database.catalog_of(arguments.url, arguments.catalog)
    if arguments.db_verb == "upgrade":
        return database.upgrade(target, arguments.as_json)
    if arguments.db_verb == "current":
        return database.current(target, arguments.as_json)
    if arguments.db_verb == "check":
        return database.check(target, arguments.as_json)
    return database.backup(target, Path(arguments.file), arguments.as_json)


def _hold(arguments: Namespace) -> int:
    from ckptfmt.cli import rebuilt
    from ckptfmt.cli.places import opened_place

    arguments.storage_option = []
    with opened_place(arguments, mode="w" if arguments.clear else "r") as place:
        return rebuilt.hold(place, clear=arguments.clear, as_json=arguments.as_json)
