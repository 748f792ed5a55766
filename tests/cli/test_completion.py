"""Shell completion: what the installed command offers for what was typed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.one_loop

COMMAND = Path(sys.executable).parent / "transferd"


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("transferd p", {"ping", "pool"}),
        ("transferd pool ", {"master", "status"}),
        ("transferd stats --format ", {"text", "json"}),
    ],
)
def test_bash_is_offered_commands_and_values(typed: str, offered: set[str]) -> None:
    said = {"_TRANSFERD_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    done = subprocess.run([COMMAND], env=os.environ | said, capture_output=True, text=True, timeout=60, check=True)
    assert set(done.stdout.split()) >= offered
