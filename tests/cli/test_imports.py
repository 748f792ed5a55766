"""What the command line imports before it runs a command."""

from __future__ import annotations

import subprocess
import sys


def test_the_command_line_imports_nothing_that_starts_threads() -> None:
    """`serve` blocks the dump signals before any thread exists: a thread that does not block them ends the daemon."""
    code = "import os, sys, transferd.cli.main; print('numpy' in sys.modules, len(os.listdir('/proc/self/task')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "1"]
