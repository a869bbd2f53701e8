"""Generations of several ranks are laid out as in tests/ranks, and those on several tiers as in tests/tiers; coroutines
run, as zarr's own suite expects."""

from __future__ import annotations

import asyncio
import inspect
import sys
from pathlib import Path

import pytest

for _rig in ("ranks", "tiers"):
    _folder = str(Path(__file__).parents[1] / _rig)
    if _folder not in sys.path:
        sys.path.append(_folder)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in a loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True
