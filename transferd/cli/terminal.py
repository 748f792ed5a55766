"""How reports are printed: within the edges of a terminal, and into a pipe or a file with one line a row.

Who reads a pipe takes lines (`transferd tasks | grep ID`), so there nothing is wrapped, however long it is.
"""

from __future__ import annotations

import re
import sys
from typing import TextIO, cast

from rich.console import Console

ENDLESS = 1_000_000  # columns of a pipe
_TRAILING = re.compile(r" +$", re.MULTILINE)


class _Lines:
    """stdout without the spaces that fill the last column of a table."""

    def write(self, text: str) -> int:
        return sys.stdout.write(_TRAILING.sub("", text))

    def flush(self) -> None:
        sys.stdout.flush()

    def isatty(self) -> bool:
        return False


def stdout() -> Console:
    """The console for a report on stdout; its width is that of the terminal, or ENDLESS."""
    console = Console(highlight=False)
    if console.is_terminal:
        return console
    return Console(file=cast("TextIO", _Lines()), width=ENDLESS, highlight=False)
