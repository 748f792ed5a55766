"""`make gpu-check`: everything that only a machine with an NVIDIA GPU can show, in one command.

    python -m tests.gpu.check [--device 0] [--only WORD] [--first] [--no-bench] [--results DIRECTORY] [--seed N]
                              [--limit SECONDS]

Needs python3 with cuda-bindings and NVRTC, and what transferd itself imports; builds and fetches nothing, and
transferd need not be installed. Every check prints one line with a verdict: right or wrong; fast or slow where it
measures beside a limit; skipped where this machine lacks what it needs. One that is wrong says how to run it alone, and
makes the exit code 1. Then the benchmark measures, and a table of all verdicts ends it. The JSON goes to
benchmarks/results/ (gpu-check.json, copy-cuda.json). What hangs ends after --limit, 9 minutes, with the traceback of
every thread; what was found by then is written.
"""

from __future__ import annotations

import importlib.util
import sys

# Module names: what the checks import, directly or through transferd.
NEEDED = (
    "numpy",
    "cuda.bindings",
    "msgspec",
    "structlog",
    "xxhash",
    "zmq",
    "uvloop",
    "h11",
    "prometheus_client",
    "rich",
    "typer",
)


def missing() -> list[str]:
    """Those of NEEDED that this Python does not have."""
    return [name for name in NEEDED if not _there(name)]


def _there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the package around it is not there
        return False


if __name__ == "__main__":
    lacking = missing()
    if lacking:
        print(f"FAIL  this Python ({sys.executable}) lacks: {', '.join(lacking)}")
        sys.exit(1)
    from tests.gpu.runner import main

    sys.exit(main())
