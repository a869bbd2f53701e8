"""URLs of servers, as users name them in ``storage_options``."""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit

from ckptfmt.errors import InvalidInput


def checked_endpoint(named: str) -> SplitResult:
    """The parts of ``http(s)://host[:port][/path]``.

    ``InvalidInput`` for anything else. Endpoints are shown, and kept in catalogs and pickles, so one that holds keys is
    refused, and no message repeats what may be one.
    """
    if "://" not in named:
        raise InvalidInput("endpoint: begin it with https:// (or http://)")
    try:
        parts = urlsplit(named)
        parts.port  # noqa: B018 - tells whether it is one
    except ValueError as error:
        raise InvalidInput(f"endpoint: {error}; give http(s)://host[:port]") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise InvalidInput(
            f"endpoint={parts.scheme}://{parts.hostname}: give http(s)://host[:port] and nothing behind it"
        )
    if parts.username or parts.password:
        raise InvalidInput("endpoint: an endpoint holds no keys; give those in storage_options, by their own names")
    return parts
