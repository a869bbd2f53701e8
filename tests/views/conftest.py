"""Generations of several ranks are laid out as in tests/ranks; coroutines run, as zarr's own suite expects."""

from __future__ import annotations

import asyncio
import inspect
import sys
from pathlib import Path

import pytest

_ranks = Path(__file__).parents[1] / "ranks"
if str(_ranks) not in sys.path:
    sys.path.append(str(_ranks))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in a loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True
