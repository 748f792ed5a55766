"""`make gpu-check`: everything that only a machine with an NVIDIA GPU can show, in one command.

    python -m tests.gpu.check [--device 0] [--only ROW,…] [--list] [--resume] [--first] [--no-bench]
                              [--results DIRECTORY] [--seed N] [--limit SECONDS]

Needs python3 with cuda-bindings and NVRTC, and what transferd itself imports; builds and fetches nothing, and
transferd need not be installed. Every row prints one line with a verdict: right or wrong; fast or slow where it
measures beside a limit; skipped where this machine lacks what it needs, or no time was left. A wrong one says how to
run it alone, and makes the exit code 1. A table of all verdicts ends it.

The JSON goes to benchmarks/results/ (gpu-check.json, copy-cuda.json) and is written after each row. A row that hangs
(90 to 150 s) or crashes costs only itself: its process ends, with the traceback of every thread, and another one goes
on. The whole run takes at most --limit, 9 minutes; --resume runs what is left. --only runs some rows (names or parts
of names) and keeps the others in the JSON; --list names all.
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
