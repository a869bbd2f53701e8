"""The console entry: verbs, and the one place where an error becomes a message and an exit code.

Verbs import what they need when they run, so that ``--help`` costs nothing but typer.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from ckptfmt.cli import db, demo, diff, inspect, ls, recover, verify
from ckptfmt.cli import gc as collect

DEBUG_VARIABLE = "CKPTFMT_DEBUG"
_EPILOG = (
    "Exit codes: 0 done, 1 bug, 2 usage, 10 not found, 11 conflict, 12 corrupt or unverifiable, 13 unsupported "
    "version, 14 storage, 15 catalog, 16 drill failed, 130 interrupted."
)

app = typer.Typer(
    name="ckptfmt",
    help="Look at, check and maintain repositories of training checkpoints.",
    epilog=_EPILOG,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        from ckptfmt.__about__ import __version__

        sys.stdout.write(f"ckptfmt {__version__}\n")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Print tracebacks of errors; also CKPTFMT_DEBUG=1.")] = False,
) -> None:
    if debug:
        os.environ[DEBUG_VARIABLE] = "1"


def _guarded(verb: Callable[..., int | None]) -> Callable[..., None]:
    """A verb whose errors are told, and end the process with their code. A verb may return a code itself."""

    @functools.wraps(verb)
    def run(*arguments: Any, **options: Any) -> None:
        try:
            code = verb(*arguments, **options) or 0
            sys.stdout.flush()
        except typer.Exit:
            raise
        except BaseException as error:
            code = _tell(error, as_json=bool(options.get("as_json")))
        if code:
            raise typer.Exit(code)

    return run


_VERBS: tuple[Callable[..., int | None], ...] = (
    inspect.inspect,
    ls.ls,
    verify.verify,
    diff.diff,
    collect.gc,
    recover.recover,
    demo.demo,
)
_DB_VERBS: tuple[Callable[..., int | None], ...] = (db.upgrade, db.current, db.check, db.backup)
for _verb in _VERBS:
    app.command()(_guarded(_verb))
_database = typer.Typer(help=db.__doc__, no_args_is_help=True, rich_markup_mode=None)
for _verb in _DB_VERBS:
    _database.command()(_guarded(_verb))
app.add_typer(_database, name="db")


def _tell(error: BaseException, *, as_json: bool) -> int:
    """Say what went wrong on standard error, with --json on standard output too; return the exit code."""
    from ckptfmt.cli import exit_codes
    from ckptfmt.errors import CkptError

    code = exit_codes.exit_code(error)
    if code == exit_codes.BROKEN_PIPE:
        # Nobody reads any more: what is buffered must not fail once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code
    if os.environ.get(DEBUG_VARIABLE):
        import traceback

        traceback.print_exception(error)
    if isinstance(error, KeyboardInterrupt):
        sys.stderr.write("ckptfmt: interrupted\n")
        return code
    if isinstance(error, CkptError):
        sys.stderr.write(f"ckptfmt: {error}\n")
    else:
        sys.stderr.write(
            f"ckptfmt: {type(error).__name__}: {error}\nThis is a bug in ckptfmt: report it with the traceback that "
            f"{DEBUG_VARIABLE}=1 prints.\n"
        )
    if as_json:
        _write_error(exit_codes.as_json(error))
    return code


def _write_error(document: dict[str, Any]) -> None:
    import json

    try:
        sys.stdout.write(json.dumps(document, indent=2, default=str) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    # A short process that imports a lot: collecting cycles meanwhile is a tenth of its time.
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a name that the terminal's encoding lacks is no error
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = app(args=given, prog_name="ckptfmt", standalone_mode=False)
    except typer.Abort as stop:
        code = _tell(
            stop.__cause__ if isinstance(stop.__cause__, KeyboardInterrupt) else KeyboardInterrupt(), as_json=False
        )
    except Exception as error:
        code = _usage(error, as_json="--json" in given)
    sys.exit(code or 0)


def _usage(error: Exception, *, as_json: bool) -> int:
    """An error of the command line itself, which typer raises with the text to show."""
    show = getattr(error, "show", None)
    if show is None:
        return _tell(error, as_json=as_json)
    show()
    code = int(getattr(error, "exit_code", 2))
    if as_json:
        message = str(getattr(error, "message", error))
        details = {"kind": "usage", "type": "UsageError", "message": message, "exit_code": code, "transient": False}
        _write_error({"error": {**details, "details": {}}})
    return code


if __name__ == "__main__":
    main()
