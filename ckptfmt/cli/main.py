"""The console entry: verbs, and the one place where an error becomes a message and an exit code.

Verbs import what they need when they run, so that ``--help`` and ``ls`` start fast. The command line is read with the
standard library: what richer libraries load costs more than a whole ``--help`` (spec/decisions/004-command-line.md).
"""

from __future__ import annotations

import gc
import os
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Final, NoReturn

from ckptfmt.__about__ import __version__
from ckptfmt.cli import bench, db, demo, diff, doctor, export, import_, inspect, ls, recover, replicate, verify
from ckptfmt.cli import gc as collect
from ckptfmt.errors import CkptError, InvalidInput

DEBUG_VARIABLE: Final = "CKPTFMT_DEBUG"
VERBS: Final[dict[str, ModuleType]] = {
    "inspect": inspect,
    "ls": ls,
    "verify": verify,
    "diff": diff,
    "replicate": replicate,
    "export": export,
    "import": import_,
    "gc": collect,
    "recover": recover,
    "db": db,
    "doctor": doctor,
    "bench": bench,
    "demo": demo,
}
_EPILOG = """\
exit codes: 0 done, 1 bug, 2 usage, 10 not found, 11 conflict, 12 corrupt or unverifiable, 13 unsupported
version, 14 storage, 15 catalog, 16 drill failed, 130 interrupted"""


_HINTS: Final = {"catalog_missing": "to read by proof on the command line: --catalog none\n"}
"""What to type, where the message speaks of Python."""


class UsageError(InvalidInput):
    """The command line itself cannot be read."""

    default_kind = "usage"


class Parser(ArgumentParser):
    """Raises what argparse would print and exit with, so that all errors are told in one place."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}\n{self.format_usage()}see {self.prog} --help")


def parser() -> ArgumentParser:
    """The whole command line."""
    whole = Parser(
        prog="ckptfmt",
        description="Look at, check and maintain repositories of training checkpoints.",
        epilog=_EPILOG,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    whole.add_argument("--version", action="version", version=f"ckptfmt {__version__}")
    whole.add_argument("--debug", action="store_true", help=f"print tracebacks of errors; also {DEBUG_VARIABLE}=1")
    verbs = whole.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, module in VERBS.items():
        text = (module.__doc__ or "").strip()
        summary = text.partition("\n")[0].rstrip(".")
        verb = verbs.add_parser(
            name,
            help=f"{summary[0].lower()}{summary[1:]}",
            description=text,
            epilog=_EPILOG,
            formatter_class=RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        module.configure(verb)
    return whole


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line (default: that of the process) and exit with its code."""
    if arguments is None:
        # A short process of our own that imports much: looking for cycles meanwhile is a good part of its time.
        gc.freeze()
        gc.set_threshold(50_000, 20, 100)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a name that the terminal's encoding lacks is no error
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = _run(parser().parse_args(given))
        sys.stdout.flush()
    except BaseException as error:  # an interrupt, too, ends in a message and a code
        code = _tell(error, as_json="--json" in given)
    sys.exit(code)


def _run(arguments: Namespace) -> int:
    if arguments.debug:
        os.environ[DEBUG_VARIABLE] = "1"
    return int(VERBS[arguments.verb].run(arguments))


def _tell(error: BaseException, *, as_json: bool) -> int:
    """Say what went wrong on standard error, with --json on standard output too; return the exit code."""
    from ckptfmt.cli import exit_codes

    if isinstance(error, SystemExit):  # --help and --version
        return int(error.code or 0)
    code = exit_codes.exit_code(error)
    if code == exit_codes.BROKEN_PIPE:
        _forget_output()
        return code
    if os.environ.get(DEBUG_VARIABLE):
        import traceback

        traceback.print_exception(error)
    sys.stderr.write(_message(error))
    if as_json:
        _write_error(exit_codes.as_json(error))
    return code


def _message(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "ckptfmt: interrupted\n"
    if isinstance(error, CkptError):
        return f"ckptfmt: {error}\n{_HINTS.get(error.kind, '')}"
    return (
        f"ckptfmt: {type(error).__name__}: {error}\n"
        f"This is a bug in ckptfmt: report it with the traceback that {DEBUG_VARIABLE}=1 prints.\n"
    )


def _write_error(document: dict[str, Any]) -> None:
    import json

    try:
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        _forget_output()


def _forget_output() -> None:
    """Nobody reads any more: what is buffered must not fail once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
