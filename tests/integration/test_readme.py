"""The quick start of the README, as it is printed there: its configuration, its program, and the same as a file."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from transferd.client.launch import running
from transferd.runtime.compat import tomllib

ROOT = Path(__file__).resolve().parents[2]
QUICK_START = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Quick start")[2]
ENDPOINT = "ipc:///tmp/transferd.sock"


def printed(pattern: str) -> str:
    match = re.search(pattern, QUICK_START, re.DOTALL)
    assert match is not None
    return match[1]


@pytest.mark.parametrize("example", ["in the README", "as a file"])
def test_the_quick_start_stores_a_block_and_reads_it_back_twice_with_other_values(example: str, tmp_path: Path) -> None:
    tree = tomllib.loads(printed(r"<<'EOF'\n(.*?)EOF\n"))
    assert tree["server"].pop("endpoint") == ENDPOINT
    assert tree["storage"]["file"].pop("path").startswith("/tmp/")
    with running(tree, tmp_path) as daemon:
        program = [str(ROOT / "examples" / "quickstart.py"), daemon.endpoint]
        if example == "in the README":
            program = ["-c", printed(r"```python\n(.*?)```").replace(ENDPOINT, daemon.endpoint)]
        for value in ("42", "43"):
            done = subprocess.run(
                [sys.executable, *program, value],
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert (done.stdout, done.stderr, done.returncode) == (f"ok ok [7] {value}\n", "", 0)


def test_the_trace_that_ships_is_the_one_that_the_script_draws() -> None:
    done = subprocess.run([sys.executable, ROOT / "scripts" / "make_trace.py", "--check"], check=False, timeout=60)
    assert done.returncode == 0, "run: python scripts/make_trace.py"
