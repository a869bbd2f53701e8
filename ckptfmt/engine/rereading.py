"""What differs from its digest is read again before that counts: it may have been damaged on its way."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, TypeVar

from ckptfmt.errors import FormatError, UnsupportedVersion

log = logging.getLogger("ckptfmt")

T = TypeVar("T")

RETRIES: Final = 2
"""How often something that differs from its digest is read once more from the same copy."""


def read_whole(read: Callable[[], T]) -> T:
    """What ``read`` returns, which reads an object or a part of one and raises ``FormatError`` if it is not whole.

    While it does it is called again, a few times; then its first error is raised. Other errors pass.
    """
    first: FormatError | None = None
    for _ in range(1 + RETRIES):
        try:
            found = read()
        except UnsupportedVersion:
            raise  # its digest holds
        except FormatError as error:
            first = first or error
            continue
        if first is not None:
            log.warning("right when it was read once more, so damaged on its way: %s", first)
        return found
    assert first is not None
    raise first
