"""The library and spec/api.md say the same."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

import ckptfmt

SPEC = (Path(__file__).resolve().parents[2] / "spec" / "api.md").read_text()
STUB = ast.parse(re.findall(r"```python\n(.*?)```", SPEC, flags=re.S)[0])

ALIASES = [node for node in STUB.body if isinstance(node, ast.Assign)]
FUNCTIONS = [node for node in STUB.body if isinstance(node, ast.FunctionDef)]
CLASSES = [node for node in STUB.body if isinstance(node, ast.ClassDef)]
ERRORS = [node for node in CLASSES if node.bases]
OBJECTS = [node for node in CLASSES if not node.bases]

MADE_INSIDE = {"Repository", "Checkpointer", "PendingSave", "Generation", "StoredTensor"}
"""Nobody constructs these; their constructors are no promise."""

INSIDE = {
    "Generation": {"require_readable", "restore_with"},
    "GenerationInfo": {"of"},
    "PendingSave": {
        *("advance", "blocked", "began", "succeeded", "failed"),  # told by the save's threads
        *("row", "error", "wait_done", "unseen_error", "defer", "lift"),  # asked by the checkpointer
    },
    "Rng": {"state", "restore", "check"},
}
"""What the rooms of the library say to each other through public classes: no promise, and no more than this."""

Parameter = tuple[str, str, Any]


def documented(node: ast.FunctionDef) -> list[Parameter]:
    arguments = node.args
    missing = inspect.Parameter.empty
    positional = [argument.arg for argument in arguments.args]
    defaults = [missing] * (len(positional) - len(arguments.defaults)) + [
        ast.literal_eval(default) for default in arguments.defaults
    ]
    found = [(name, "positional", default) for name, default in zip(positional, defaults, strict=True)]
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append((argument.arg, "keyword", missing if default is None else ast.literal_eval(default)))
    return found


def actual(function: Any) -> list[Parameter]:
    kinds = {
        inspect.Parameter.POSITIONAL_OR_KEYWORD: "positional",
        inspect.Parameter.KEYWORD_ONLY: "keyword",
    }
    return [(p.name, kinds[p.kind], p.default) for p in inspect.signature(function).parameters.values()]


def test_all_names() -> None:
    names = [node.targets[0].id for node in ALIASES]  # type: ignore[attr-defined]
    names += [node.name for node in (*FUNCTIONS, *CLASSES)]
    assert sorted(names) == list(ckptfmt.__all__) == sorted(set(names))
    assert set(ckptfmt.__all__) <= set(dir(ckptfmt))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        ckptfmt.nothing  # noqa: B018


def test_star_import_gives_the_surface_and_no_more() -> None:
    namespace: dict[str, Any] = {}
    exec("from ckptfmt import *", namespace)
    assert set(namespace) - {"__builtins__"} == set(ckptfmt.__all__)


@pytest.mark.parametrize("node", FUNCTIONS, ids=lambda node: node.name)
def test_functions(node: ast.FunctionDef) -> None:
    function = getattr(ckptfmt, node.name)
    assert actual(function) == documented(node)
    assert inspect.getdoc(function)


@pytest.mark.parametrize("node", OBJECTS, ids=lambda node: node.name)
def test_classes(node: ast.ClassDef) -> None:
    cls = getattr(ckptfmt, node.name)
    assert inspect.getdoc(cls)
    methods = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
    attributes = {item.target.id for item in node.body if isinstance(item, ast.AnnAssign)}  # type: ignore[union-attr]
    for name, item in methods.items():
        assert actual(getattr(cls, name)) == documented(item), name
    fields = {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    public = {name for kind in cls.__mro__ for name in vars(kind) if not name.startswith("_")}
    if issubclass(cls, ckptfmt.Generation):
        public -= {"get", "items", "keys", "values"}  # of Mapping
    promised = {name for name in (*methods, *attributes) if not name.startswith("_")}
    given = (
        set(re.findall(r"^        self\.([a-z]\w*)(?:: [^=]+)? = ", inspect.getsource(cls.__init__), re.M))
        if (node.name in MADE_INSIDE)
        else set()
    )
    if dataclasses.is_dataclass(cls) and "__init__" in methods:
        fields -= {name for name, *_ in documented(methods["__init__"])}  # told by the constructor
        public -= {name for name, *_ in documented(methods["__init__"])}
    assert public | fields | given == promised | INSIDE.get(node.name, set())


@pytest.mark.parametrize("node", ERRORS, ids=lambda node: node.name)
def test_errors(node: ast.ClassDef) -> None:
    cls = getattr(ckptfmt, node.name)
    assert [base.__name__ for base in cls.__bases__] == [base.id for base in node.bases]  # type: ignore[attr-defined]
    assert inspect.getdoc(cls)


SAMPLES: dict[str, dict[str, Any]] = {
    "Mismatch": {"problems": ("a", "b")},
    "Corrupt": {"object": "runs/x/p", "tensor": "w", "offset": 4096},
    "BackendError": {"errno": 5, "transient": True},
    "Unavailable": {"errno": 110},
    "AccessDenied": {"errno": 13},
    "OutOfSpace": {"needed": 10, "free": 3, "errno": 28},
    "SaveFailed": {"stage": "merge", "rank": 3, "key": "k", "generation_id": 7},
    "OutcomeUnknown": {"stage": "commit", "rank": 0, "key": "k", "generation_id": None},
}


@pytest.mark.parametrize("node", ERRORS, ids=lambda node: node.name)
def test_errors_pickle_with_their_attributes(node: ast.ClassDef) -> None:
    error = getattr(ckptfmt, node.name)("what and what next", **SAMPLES.get(node.name, {}), kind="special")
    error.add_note("a note")
    copied = pickle.loads(pickle.dumps(error))
    assert type(copied) is type(error)
    assert vars(copied) == vars(error)
    assert str(copied) == str(error)
    assert copied.kind == "special"
    for name, value in SAMPLES.get(node.name, {}).items():
        assert getattr(copied, name) == value
    kinds = [getattr(ckptfmt, other.name).default_kind for other in ERRORS]
    assert len(set(kinds)) == len(kinds), "each class has a code of its own"


def statements(function: Any) -> int:
    """Lines of a function that do something: without signature, docstring, comments and blank lines."""
    body = ast.parse(inspect.cleandoc("\n" + inspect.getsource(function))).body[0].body  # type: ignore[attr-defined]
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]
    return sum(node.end_lineno - node.lineno + 1 for node in body)


def test_the_front_stays_thin() -> None:
    methods = {
        name: value
        for name, value in vars(ckptfmt.Repository).items()
        if inspect.isfunction(value) and not name.startswith("_")
    }
    assert len(methods) <= 15
    assert {name: n for name, value in methods.items() if (n := statements(value)) > 8} == {}
