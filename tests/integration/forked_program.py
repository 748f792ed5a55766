"""A program for tests: what a process can know of how it was started, as JSON; then it does as its argument says."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import Any

SET_BESIDE_PYTHON = ("LINES", "COLUMNS")  # by readline, for the process that runs the tests; `os.environ` has neither


def known() -> dict[str, Any]:
    """What must be the same however the process was started."""
    return {
        "arguments": sys.argv[1:],
        "name": __name__,
        "directory": os.getcwd(),
        "environment": {name: value for name, value in os.environ.items() if name not in SET_BESIDE_PYTHON},
        "parent": os.getppid(),
        "leads": os.getsid(0) == os.getpid(),
        "descriptors": sorted(int(fd) for fd in os.listdir("/proc/self/fd") if int(fd) < 3),
        "open": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "signals": {name: str(signal.getsignal(getattr(signal, name))) for name in ("SIGINT", "SIGTERM", "SIGPIPE")},
        "flags": str(sys.flags),
        "path": sys.path,
        "streams": [
            (one.fileno(), one.mode, one.encoding, one.errors, one.line_buffering, one.write_through)  # type: ignore[union-attr]
            for one in (sys.stdin, sys.stdout, sys.stderr)
        ],
    }


if __name__ == "__main__":
    print(json.dumps(known()))
    print("and this", file=sys.stderr)
    match sys.argv[1:2]:
        case ["raises"]:
            raise ValueError("as ordered")
        case ["exits"]:
            sys.exit(7)
        case ["reads"]:
            print(sys.stdin.read())
        case ["waits"]:
            sys.stdout.flush()
            signal.pause()
