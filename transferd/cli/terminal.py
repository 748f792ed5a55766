"""How reports are printed: within the edges of a terminal, and into a pipe or a file with one line a row.

Who reads a pipe takes lines (`transferd tasks | grep ID`), so there nothing is wrapped, however long it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, TextIO, cast

from rich.console import Console

if TYPE_CHECKING:
    from transferd.client.client import Client

ENDLESS = 1_000_000  # columns of a pipe
LOOK_EVERY_S = 0.2
SLOW_S = 2.0  # after which a wait is shown that has no figure of its own
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


@contextlib.asynccontextmanager
async def progress(client: Client, what: str) -> AsyncIterator[None]:
    """On a terminal, show how much is left; without a figure, for how long this has taken, once that is SLOW_S.

    what: the figure of the storage report; "" for none.
    """
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    title = what.removesuffix("_bytes") or "waiting for the daemon"
    figure = [] if not what else [BarColumn(), MofNCompleteColumn() if title == what else DownloadColumn(True)]
    bar = Progress(TextColumn(title), *figure, TimeElapsedColumn(), console=Console(stderr=True), transient=True)

    async def look() -> None:
        task, total = bar.add_task(title, total=None), 0
        await asyncio.sleep(0 if what else SLOW_S)
        with bar:
            while True:
                if what:
                    storage = (await client.stats())["storage"]
                    left = storage.get(what) or sum(row.get(what, 0) for row in storage.get("levels", ()))
                    total = max(total, left)
                    bar.update(task, total=total or None, completed=total - left)
                await asyncio.sleep(LOOK_EVERY_S)

    looking = asyncio.create_task(look())
    try:
        yield
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
