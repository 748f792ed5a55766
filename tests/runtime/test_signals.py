"""What signals do to a process that runs ProcessSignals, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, os, signal, sys
import uvloop
from transferd.runtime.compat import Runner
from transferd.runtime.signals import ProcessSignals

async def main():
    with ProcessSignals(5.0, lambda: None) as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        await signals.stop
    os.kill(os.getpid(), getattr(signal, sys.argv[2]))

with Runner(loop_factory=getattr(sys.modules[sys.argv[1]], "new_event_loop")) as runner:
    runner.run(main())
os.kill(os.getpid(), getattr(signal, sys.argv[2]))
print("ended by itself")
"""


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("late", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_signal_that_comes_after_the_stop_does_not_kill_the_process(loop: str, late: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, loop, late], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended by itself\n", "")
