"""The program as users start it: exit codes, pipes, start-up, and what is not imported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_fixtures import flip, python, run, save_steps

import ckptfmt
from ckptfmt import errors
from ckptfmt.cli import exit_codes, main
from ckptfmt.cli.demo import seconds

VERBS = [
    *["inspect", "ls", "verify", "diff", "replicate", "export", "import"],
    *["gc", "recover", "db", "doctor", "bench", "demo"],
]
DB_VERBS = ["upgrade", "current", "check", "backup"]


def start(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [*python(), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})


def test_installed_command() -> None:
    done = subprocess.run([Path(sys.executable).with_name("ckptfmt"), "--version"], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout == f"ckptfmt {ckptfmt.__version__}\n"


@pytest.mark.parametrize(
    "verb", [[], *([verb] for verb in VERBS), *(["db", v] for v in ("upgrade", "current", "check", "backup"))]
)
def test_help_of_every_verb(verb: list[str]) -> None:
    result = run(*verb, "--help")
    assert result.code == 0
    assert result.out.startswith(f"usage: {' '.join(['ckptfmt', *verb])} ")
    assert list(main.VERBS) == VERBS


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ([], 2),
        (["nope"], 2),
        (["ls"], 2),
        (["db"], 2),
        (["ls", "x", "--lim", "3"], 2),
        (["ls", "x", "--storage-option", "direct"], 2),
        (["ls", "gopher://x"], 2),
        (["ls", "x#"], 2),
        (["ls", "/no/such/place"], 10),
        (["demo", "--chaos", "soon"], 2),
        (["demo", "--ranks", "three"], 2),
        (["demo", "--ranks", "3"], 2),
        (["demo", "--ranks", "4", "--chaos", "1s"], 2),
        (["demo", "--s3", "--ranks", "4"], 2),
        (["demo", "--s3", "--chaos", "1s"], 2),
        (["demo", "--s3", "--catalog", "sqlite:////x"], 2),
        (["demo", "--catalog", "sqlite:////x"], 2),
        (["doctor", "x#run"], 2),
        (["doctor", "memory://x"], 2),
        (["bench", "x", "--bytes", "much"], 2),
        (["bench", "x", "--saves", "1"], 2),
    ],
)
def test_usage_and_not_found(arguments: list[str], code: int) -> None:
    result = run(*arguments)
    assert (result.code, result.out) == (code, "")
    assert result.err.startswith("ckptfmt: ")


@pytest.mark.slow
def test_exit_codes_of_processes(tmp_path: Path) -> None:
    save_steps(tmp_path, 10)
    done = start("ls", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    flip(next(tmp_path.glob("runs/*/*/r00000-p000.safetensors")), 4096)
    done = start("verify", tmp_path)
    assert (done.returncode, done.stderr) == (12, "")
    assert "corrupt" in done.stdout
    (tmp_path / "catalog.sqlite").write_bytes(b"no database" * 100)
    assert start("ls", tmp_path).returncode == 15
    marker = tmp_path / "ckptfmt.json"
    marker.write_bytes(marker.read_bytes()[:-5])
    assert start("ls", tmp_path).returncode == 12


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InvalidInput("m"), 2),
        (errors.Mismatch("m", ("p",)), 2),
        (errors.UnsupportedValue("m"), 2),
        (errors.NotFound("m"), 10),
        (errors.NotCommitted("m"), 10),
        (errors.Conflict("m"), 11),
        (errors.Fenced("m"), 11),
        (errors.CatalogBehind("m"), 11),
        (errors.FormatError("m"), 12),
        (errors.Corrupt("m", object="o", offset=3), 12),
        (errors.Unverifiable("m"), 12),
        (errors.UnsupportedVersion("m"), 13),
        (errors.BackendError("m", errno=5), 14),
        (errors.Unavailable("m"), 14),
        (errors.AccessDenied("m"), 14),
        (errors.OutOfSpace("m", needed=1), 14),
        (errors.CatalogError("m"), 15),
        (errors.SaveFailed("m", stage="persist"), 14),
        (errors.OutcomeUnknown("m", stage="commit"), 15),
        (errors.DrillFailed("m"), 16),
        (KeyboardInterrupt(), 130),
        (BrokenPipeError(), 141),
        (ValueError("m"), 1),
    ],
)
def test_every_error_has_its_code(error: BaseException, code: int) -> None:
    assert exit_codes.exit_code(error) == code


def test_no_error_class_was_forgotten() -> None:
    covered = {mark for mark in errors.__all__ if mark != "CkptError"}
    for name in covered:
        kind = getattr(errors, name)
        extra = {"stage": "persist"} if issubclass(kind, errors.SaveFailed) else {}
        assert exit_codes.exit_code(kind("m", **extra)) != exit_codes.BUG


def test_a_failed_save_has_the_code_of_its_cause() -> None:
    failed = errors.SaveFailed("m", stage="persist")
    failed.__cause__ = errors.CatalogError("c")
    assert exit_codes.exit_code(failed) == 15


@pytest.mark.parametrize(
    ("kind", "code"),
    [("corrupt", 12), ("not_found", 12), ("unavailable", 14), ("out_of_space", 14), ("unsupported_version", 13)],
)
def test_problems_of_reports_have_codes_too(kind: str, code: int) -> None:
    assert exit_codes.problem_code(kind) == code


def test_errors_as_json() -> None:
    result = run("ls", "/no/such/place", "--json")
    assert result.json() == {
        "error": {
            "kind": "not_found",
            "type": "NotFound",
            "message": result.err.removeprefix("ckptfmt: ").rstrip("\n"),
            "exit_code": 10,
            "transient": False,
            "details": {},
        }
    }
    assert run("ls", "--json").json()["error"]["kind"] == "usage"
    document = exit_codes.as_json(errors.Corrupt("m", object="o", tensor="t", offset=3))
    assert document["error"]["details"] == {"object": "o", "tensor": "t", "offset": 3}
    assert exit_codes.as_json(errors.AccessDenied("m", errno=13))["error"]["details"] == {"errno": 13}
    assert exit_codes.as_json(KeyError("k"))["error"]["kind"] == "bug"


def test_a_bug_is_called_a_bug(monkeypatch: pytest.MonkeyPatch, repository: Path) -> None:
    def broken(site: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr("ckptfmt.overview.runs", broken)
    monkeypatch.delenv(main.DEBUG_VARIABLE, raising=False)
    result = run("ls", repository)
    assert result.code == 1
    assert "RuntimeError: boom" in result.err
    assert "This is a bug" in result.err
    assert "Traceback" not in result.err
    monkeypatch.setenv(main.DEBUG_VARIABLE, "1")
    assert "Traceback" in run("ls", repository).err


def test_a_closed_pipe_is_silent(repository: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*python(), "ls", str(repository)], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_interrupt_is_a_code_not_a_traceback(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    hang = (
        "import ckptfmt.overview as o, time; o.runs = lambda site: time.sleep(60)\nfrom ckptfmt.cli.main import main\n"
    )
    save_steps(tmp_path / "ckpts", 1)
    ready = f"open({str(fifo)!r}, 'w').close()\n"
    code = f"{hang}{ready}main(['ls', {str(tmp_path / 'ckpts')!r}])"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    with fifo.open():
        pass
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "ckptfmt: interrupted\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ["ls"],
        ["ls", "#train"],
        ["inspect"],
        ["inspect", "#train@3"],
        ["verify"],
        ["replicate"],
        ["gc"],
        ["recover", "--dry-run"],
    ],
)
def test_reading_works_without_torch(repository: Path, tmp_path: Path, arguments: list[str]) -> None:
    """A torch that cannot be imported is first on the path."""
    (tmp_path / "torch.py").write_text("raise AssertionError('torch was imported')\n")
    verb, *rest = arguments
    reference = "".join(part for part in rest if part.startswith("#"))
    flags = [part for part in rest if part.startswith("--")]
    done = start(verb, f"{repository}{reference}", *flags, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr


def test_ls_imports_neither_torch_nor_numpy_nor_sqlalchemy(repository: Path) -> None:
    code = (
        "import sys\nfrom ckptfmt.cli.main import main\n"
        f"try: main(['ls', {str(repository)!r}])\n"
        "except SystemExit: pass\n"
        "print(*sorted({'torch', 'numpy', 'alembic', 'sqlalchemy', 'typer', 'rich', 'pydantic'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "", done.stdout + done.stderr


@pytest.mark.parametrize(("text", "expected"), [("60", 60), ("60s", 60), ("1.5m", 90), ("1h", 3600)])
def test_times_of_the_demo(text: str, expected: float) -> None:
    assert seconds(text) == expected


def test_demo_hands_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[object, ...]] = []

    class Report:
        def as_json(self) -> dict[str, object]:
            return {"steps": 7}

    def fake(*arguments: object, keep: bool, echo: Callable[[str], None]) -> Report:
        calls.append((*arguments, keep))
        echo("training")
        return Report()

    monkeypatch.setattr("ckptfmt.demo.main.run_demo", fake)
    monkeypatch.setattr("ckptfmt.demo.main.run_chaos", fake)
    assert run("demo", "there", "--keep").out == "training\n"
    result = run("demo", "--chaos", "2m", "--json")
    assert (result.json(), result.err) == ({"steps": 7}, "training\n")
    assert calls == [("there", True), (120.0, None, False)]


def test_demos_of_many_ranks_and_of_s3_get_their_options(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, object]] = []

    class Report:
        def as_json(self) -> dict[str, object]:
            return {"ranks": 4}

    def fake(directory: str, **options: object) -> Report:
        calls.append({"directory": directory, **options})
        return Report()

    monkeypatch.setattr("ckptfmt.demo.ranks.main.run_ranks_demo", fake)
    monkeypatch.setattr("ckptfmt.demo.s3.run_s3_demo", fake)
    result = run("demo", "there", "--ranks", "4", "--catalog", "postgresql://db/x", "--json")
    assert result.json() == {"ranks": 4}
    run("demo", "there", "--s3", "--keep", "--json")
    told, of_s3 = calls
    assert told.pop("echo")
    assert told == {"directory": "there", "ranks": 4, "catalog": "postgresql://db/x", "keep": False}
    assert of_s3.pop("echo")
    assert of_s3 == {"directory": "there", "keep": True}
