"""A daemon that belongs to one engine: `transferd serve`, and a clean stop when the engine is gone.

    python -m transferd.adapters.embedded CONFIG

Standard input is a pipe that the engine holds open and never writes to. When the engine ends, in whatever way, the
kernel closes the engine's end, and the daemon stops as on SIGTERM.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

from transferd.config import load
from transferd.errors import TransferError
from transferd.runtime.signals import hold_dump_signals


def run(config_file: Path) -> int:
    """Serve until a signal, or until standard input ends. Returns the exit code."""
    hold_dump_signals()  # before any thread starts
    from transferd.daemon.process import serve

    threading.Thread(target=_stop_with_the_engine, name="engine-watch", daemon=True).start()
    try:
        return serve(load(config_file))
    except TransferError as error:
        print(f"transferd: {error}", file=sys.stderr)
        return 1


def _stop_with_the_engine() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1])))
