"""``make fuzz``: every parser under a coverage-guided fuzzer, for a bounded time and in bounded memory.

    python tests/hostile/fuzz.py [--seconds 9] [TARGET ...]

Each target runs in a process of its own. The first input that breaks a promise is kept in ``.cache/fuzz-crashes``, and
the exit status says that there was one. Run it again with ``python tests/hostile/fuzz.py --input FILE TARGET``.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

CRASHES = Path(".cache/fuzz-crashes")
RSS_MB_MAX = 1500
INPUT_SECONDS_MAX = 10
INPUT_BYTES_MAX = 1 << 16


def child(name: str, options: list[str]) -> None:
    """Fuzz one target until libFuzzer ends this process."""
    import atheris

    with atheris.instrument_imports(include=["ckptfmt"]):
        import fuzz_targets

    target, _ = fuzz_targets.TARGETS[name]
    atheris.Setup([sys.argv[0], *options], lambda data: (target(bytes(data)), None)[1])
    atheris.Fuzz()


def fuzz(name: str, seconds: int) -> bool:
    """Whether ``name`` stood ``seconds`` of it. Prints how many inputs that were."""
    import fuzz_targets

    _, seeds = fuzz_targets.TARGETS[name]
    with tempfile.TemporaryDirectory() as place:
        corpus = Path(place) / "corpus"
        corpus.mkdir()
        for number, seed in enumerate(seeds):
            (corpus / f"seed-{number}").write_bytes(seed)
        words = Path(place) / "words"
        escaped = ["".join(f"\\x{byte:02x}" for byte in word) for word in fuzz_targets.WORDS if len(word) <= 64]
        words.write_text("".join(f'"{word}"\n' for word in escaped))
        CRASHES.mkdir(parents=True, exist_ok=True)
        options = [
            f"-max_total_time={seconds}",
            f"-timeout={INPUT_SECONDS_MAX}",
            f"-rss_limit_mb={RSS_MB_MAX}",
            f"-max_len={INPUT_BYTES_MAX}",
            f"-dict={words}",
            f"-artifact_prefix={CRASHES / name}-",
            "-print_final_stats=1",
            "-verbosity=1",
            str(corpus),
        ]
        command = [sys.executable, __file__, "--child", name, "--", *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 120)
    runs = re.search(r"number_of_executed_units:\s*(\d+)", done.stderr)
    features = re.findall(r"\bft: (\d+)", done.stderr)
    found = done.returncode != 0 or runs is None
    print(
        f"{name:<14} {runs[1] if runs else '?':>9} inputs, {features[-1] if features else '?':>6} features, "
        f"{'BROKEN' if found else 'nothing but FormatError'}",
        flush=True,
    )
    if found:
        told = [line for line in done.stderr.splitlines() if not line.startswith("#")]
        print(done.stdout[-4000:], *told[-40:], sep="\n")
    return not found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*")
    parser.add_argument("--seconds", type=int, default=9, help="for each target")
    parser.add_argument("--input", type=Path, help="run one input instead")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child, arguments.targets)
        return 0
    import fuzz_targets

    names = arguments.targets or list(fuzz_targets.TARGETS)
    if arguments.input:
        print(fuzz_targets.TARGETS[names[0]][0](arguments.input.read_bytes()))
        return 0
    sound = [fuzz(name, arguments.seconds) for name in names]
    return 0 if all(sound) else 1


if __name__ == "__main__":
    sys.exit(main())
