"""Each program in examples/ runs as its first lines say, with a daemon of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
PRINTS = {
    "follow_events.py": "BlockStored STORAGE True\n",
    "plain_files.py": "ok ok 42.0 1 file\n",
    "engine_creates.py": "ok ok [7] 42\n",
    "own_adapter.py": "[True, True] [True, False] [True, False, True] [[42, 0, 42], [42, 0, 42]]\n",
    "register_engine.py": "ok ok [7] [42.0, 42.0]\n",
    "small_adapter.py": "2 32 42.0 43.0\n",
}
ELSEWHERE = {"quickstart.py": "test_readme.py"}  # needs the daemon of the README

pytestmark = pytest.mark.one_loop


def test_each_example_is_tested() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == PRINTS.keys() | ELSEWHERE.keys()


@pytest.mark.parametrize("name", PRINTS)
def test_an_example_runs(name: str) -> None:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("TRANSFERD_")}
    done = subprocess.run(
        [sys.executable, EXAMPLES / name], capture_output=True, text=True, timeout=120, check=False, env=clean
    )
    assert (done.returncode, done.stdout) == (0, PRINTS[name]), done.stderr
