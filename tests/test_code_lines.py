"""The count of code that issues and their notes quote."""

from __future__ import annotations

import pytest

from scripts.code_lines import code_lines


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", 0),
        ('"""A docstring\nof two lines."""\n\nx = 1\n', 1),
        ("# a comment\nx = 1  # another\n", 1),
        ('def f():\n    """One."""\n    return (\n        1\n    )\n', 4),
        ('x = """text\nof code"""\n', 2),
        ('class A:\n    a: int\n    """What a is."""\n', 2),
    ],
)
def test_only_lines_of_code_are_counted(text: str, lines: int) -> None:
    assert code_lines(text) == lines
