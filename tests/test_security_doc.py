"""docs/security.md names a test for each promise: they are all there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "security.md").read_text())


def test_the_page_names_tests() -> None:
    assert len(NAMED) > 30


@pytest.mark.parametrize(("file", "test"), NAMED)
def test_a_promise_has_its_test(file: str, test: str) -> None:
    assert re.search(rf"^\s*(async )?def {test}\(", (ROOT / file).read_text(), re.MULTILINE)
