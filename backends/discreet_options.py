"""``storage_options`` some of which are secrets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

_SECRET: Final = frozenset(
    {"key", "secret", "token", "credentials", "account_key", "sas_token", "client_secret", "service_account"}
)


class DiscreetOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Shows in logs and tracebacks what was chosen, but for the values of secrets."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.__rich_repr__())})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        values = [(field.name, getattr(self, field.name)) for field in msgspec.structs.fields(self)]
        return [(name, "..." if name in _SECRET and value is not None else value) for name, value in values]


def chosen(options: msgspec.Struct) -> Mapping[str, Any]:
    """What differs from the defaults and is no secret."""
    pairs = [(field, getattr(options, field.name)) for field in msgspec.structs.fields(options)]
    return {field.name: value for field, value in pairs if field.name not in _SECRET and value != field.default}
