"""Arguments and options that verbs share."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ckptfmt.errors import InvalidInput

Url = Annotated[
    str, typer.Argument(metavar="URL[#RUN[@ID]]", help="Repository, or a reference into it: path, URL, URL#run, ...")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on standard output (spec/cli-json.md).")]
Catalog = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help='Catalog database; "none" reads what storage proves. Default: $CKPTFMT_CATALOG, else embedded.',
    ),
]
StorageOption = Annotated[
    list[str] | None, typer.Option("--storage-option", metavar="KEY=VALUE", help="For the storage; may be repeated.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Tracebacks on errors; also CKPTFMT_DEBUG=1.")]


def storage_options(given: list[str] | None) -> dict[str, Any] | None:
    """``KEY=VALUE`` pairs as a mapping; true, false and numbers are taken for what they are."""
    if not given:
        return None
    options: dict[str, Any] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise InvalidInput(f"--storage-option {text!r}: write KEY=VALUE")
        options[key] = _plain(value)
    return options


def _plain(value: str) -> Any:
    if value in ("true", "false"):
        return value == "true"
    try:
        return int(value)
    except ValueError:
        return value
