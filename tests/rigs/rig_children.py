"""Runs a function in a forked child, as another user or under other limits, and brings its result back."""

from __future__ import annotations

import json
import os
import traceback
import warnings
from collections.abc import Callable
from typing import Any


def in_child(body: Callable[[], Any], *, uid: int | None = None) -> Any:
    """Return what ``body`` returns (as JSON has it); ``AssertionError`` with the child's traceback if it raised."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads that other tests left do not matter to the child
        child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            if uid is not None:
                os.setgroups([])
                os.setgid(uid)
                os.setuid(uid)
            answer = json.dumps([True, body()])
        except BaseException:
            answer = json.dumps([False, traceback.format_exc()])
        with os.fdopen(writing, "w") as pipe:
            pipe.write(answer)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        data = pipe.read()
    os.waitpid(child, 0)
    assert data, "the child died without an answer"
    fine, result = json.loads(data)
    assert fine, result
    return result
