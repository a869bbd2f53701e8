"""Arguments and options that verbs share, and how their values are read."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError
from typing import Any

from ckptfmt.errors import InvalidInput

REFERENCE = "URL[#RUN[@ID]]"


def add_url(parser: ArgumentParser) -> None:
    parser.add_argument(
        "url",
        metavar=REFERENCE,
        help="a repository (path or URL), or a reference into it: URL#run, URL#run@id, URL#run@step:N, URL#run@tag:T",
    )


def add_storage(parser: ArgumentParser) -> None:
    """Where to find the catalog and how to reach the storage."""
    add_catalog(parser)
    parser.add_argument(
        "--storage-option",
        action="append",
        type=_pair,
        default=[],
        metavar="KEY=VALUE",
        help="an option of the storage; may be repeated",
    )


def add_catalog(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--catalog",
        metavar="URL",
        help='catalog database; "none" reads what storage proves (default: $CKPTFMT_CATALOG, else the embedded one)',
    )


def add_tiers(parser: ArgumentParser) -> None:
    """Tiers beside the durable one; those that the catalog knows are found without."""
    parser.add_argument(
        "--stage", metavar="PATH", help="the stage of this host (default: the one that the catalog knows)"
    )
    parser.add_argument(
        "--replica",
        action="append",
        default=[],
        metavar="URL",
        help="a replica; may be repeated (default: those that the catalog knows)",
    )


def find_tiers(parser: ArgumentParser) -> None:
    """Read from the tiers that the catalog knows, too; none is named, since there may be two repositories."""
    parser.set_defaults(stage=None, replica=[])


def add_output(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--json", dest="as_json", action="store_true", help="one JSON document on standard output (spec/cli-json.md)"
    )


def storage_options(pairs: list[tuple[str, Any]]) -> dict[str, Any] | None:
    """The pairs of ``--storage-option`` as a mapping; ``InvalidInput`` for one that is given twice."""
    options: dict[str, Any] = {}
    for key, value in pairs:
        if key in options:
            raise InvalidInput(f"--storage-option {key} is given twice: give it once")
        options[key] = value
    return options or None


def _pair(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ArgumentTypeError(f"{text!r}: write KEY=VALUE")
    return key, _plain(value)


def _plain(value: str) -> Any:
    """true, false and whole numbers for what they are, everything else as text."""
    if value in ("true", "false"):
        return value == "true"
    try:
        return int(value)
    except ValueError:
        return value


def positive(text: str) -> int:
    """A number from 1 on."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r}: give a positive number")
    return int(text)


def count_or_all(text: str) -> int:
    """A number from 0 on, where 0 means no limit."""
    if not text.isascii() or not text.isdigit():
        raise ArgumentTypeError(f"{text!r}: give a number, 0 for all")
    return int(text)
