"""docs/security.md names a test for each promise: they are all there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "security.md").read_text())


def test_the_page_names_tests() -> None:
    assert len(NAMED) > 30


@pytest.mark.parametrize(("file", "test"), NAMED)
def test_a_promise_has_its_test(file: str, test: str) -> None:
    assert re.search(rf"^\s*(async )?def {test}\(", (ROOT / file).read_text(), re.MULTILINE)


def test_every_resource_has_a_row_and_the_table_is_what_the_code_says() -> None:
    """A bound in the code without a row in the ledger, or a changed number, is red here."""
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "costs_ledger.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, f"{done.stdout or 'the table differs'}; run: python scripts/costs_ledger.py"
