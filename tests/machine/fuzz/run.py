"""Coverage-guided fuzzing of one target, with the extra `fuzz`.

    python -m tests.machine.fuzz.run TARGET [libFuzzer options]

`-runs=N` or `-max_total_time=SECONDS` bound it; an input that breaks a promise is left in a file and shown.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["transferd"]):
    from tests.machine.fuzz.targets import TARGETS, seeds


def main(name: str, options: list[str]) -> None:
    """Does not return: libFuzzer ends the process."""
    corpus = Path(tempfile.mkdtemp(prefix="transferd-fuzz-"))
    for number, seed in enumerate(seeds(name)):
        (corpus / f"{number}").write_bytes(seed)
    target = TARGETS[name]
    atheris.Setup([sys.argv[0], str(corpus), "-max_len=4096", *options], target)
    atheris.Fuzz()


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in TARGETS:
        sys.exit(f"usage: python -m tests.machine.fuzz.run {{{','.join(TARGETS)}}} [libFuzzer options]")
    main(sys.argv[1], sys.argv[2:])
