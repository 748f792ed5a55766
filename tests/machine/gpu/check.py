"""`make gpu-check`: everything that only a machine with an NVIDIA GPU can show, in one command.

    python -m tests.machine.gpu.check [--device 0] [--only ROW,…] [--skip ROW,…] [--list] [--resume] [--first]
                                      [--no-bench] [--results DIRECTORY] [--seed N] [--limit SECONDS]

Needs python3 with cuda-bindings and NVRTC, and what transferd itself imports; builds and fetches nothing, and
transferd need not be installed. Every row prints one line with a verdict: right or wrong; fast or slow where it
measures beside a limit; skipped where this machine lacks what it needs, or no time was left. A wrong one says how to
run it alone, and makes the exit code 1. A table of all verdicts ends it.

The JSON goes to benchmarks/results/ (gpu-check.json, copy-cuda.json) and is written after each row. A row that hangs
(90 to 150 s) or crashes costs only itself: its process ends, with the traceback of every thread, and another one goes
on. The whole run takes at most --limit, 9 minutes, and names what it leaves; --resume runs that. --only and --skip
choose rows by names or parts of names; --list names all. The JSON keeps what earlier runs found, on this and on other
GPUs: rows belong to a GPU's name and a driver. Without a driver each row is named, as not run.
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
    "tomli_w",
    "xxhash",
    "zmq",
    "uvloop",
    "h11",
    "prometheus_client",
    "rich",
    "typer",
)
# Packages that are not called like their modules.
PACKAGES = {
    "cuda.bindings": "cuda-bindings",
    "cuda.pathfinder": "cuda-pathfinder",
    "tomli_w": "tomli-w",
    "zmq": "pyzmq",
    "prometheus_client": "prometheus-client",
}


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
        packages = " ".join(PACKAGES.get(name, name) for name in lacking)
        print(f"FAIL  this Python ({sys.executable}) lacks {', '.join(lacking)}: pip install {packages}")
        sys.exit(1)
    from tests.machine.gpu.runner import main

    sys.exit(main())
