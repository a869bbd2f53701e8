"""Opens ``s3://`` URLs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptfmt.backends.object import ObjectBackend
from ckptfmt.backends.object_publishing import Place
from ckptfmt.backends.object_retry import Patience
from ckptfmt.backends.s3_options import parse_place
from ckptfmt.backends.s3_store import S3Store


def s3_backend(url: str, given: Mapping[str, Any] | None = None) -> ObjectBackend:
    """Return the backend of ``s3://bucket/prefix?option=value``. Nothing is sent yet.

    ``InvalidInput`` for a bad URL or an unknown option.
    """
    place = parse_place(url, given)
    options = place.options
    store = S3Store(place)
    return ObjectBackend(
        Place(
            store=store,
            url=place.url,
            shown=place.url.partition("?")[0],
            root=f"{place.prefix}/" if place.prefix else "",
            patience=Patience(options.retry_attempts, options.retry_seconds),
            single_writer=options.single_writer,
            upload_grace=options.upload_grace,
            options=place.beside_url,
        ),
        "s3",
        multipart=store,
    )
