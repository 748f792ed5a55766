"""The loop of `transferd top`: poll the daemon, read keys, draw. It changes nothing, so observers may run it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.control import Control
from rich.text import Text

from transferd.cli.asking import Format
from transferd.cli.lists import no_rows
from transferd.cli.terminal import stdout
from transferd.cli.top.figures import Figures, Samples
from transferd.cli.top.screen import KEYS, SORTS, View, ordered, screen
from transferd.errors import TransferError
from transferd.observability.report import read
from transferd.observability.story import as_text
from transferd.runtime.compat import timeout, timeout_at

if TYPE_CHECKING:
    from transferd.client.client import Client

ROWS = 400  # tasks per poll: enough for percentiles, about 100 KB
_KEYS = {"\x1b[A": "up", "\x1b[B": "down", "k": "up", "j": "down", "\r": "enter", "\n": "enter", "e": "enter"}
_KEYS |= {"\x1b": "back", "q": "quit", "s": "sort", "p": "pause", " ": "pause"}


def watch(
    client: Callable[[], AbstractAsyncContextManager[Client]],
    *,
    once: bool,
    interval: float,
    engine: str,
    format_: Format,
) -> None:
    """Draw until the user quits.

    client: connects to the daemon.
    once: print one screen instead.
    """

    async def run() -> None:
        async with client() as it:
            await no_rows(it, engine)
            await (_print_once(it, interval, format_, engine) if once else _Live(it, interval, engine).run())

    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C ends it, like `q`
        asyncio.run(run())


async def _print_once(client: Client, interval: float, format_: Format, engine: str) -> None:
    samples = Samples(engine)
    samples.add(read(await client.stats()), [])
    await asyncio.sleep(interval)
    figures = samples.add(read(await client.stats()), await client.tasks("recent", ROWS, engine))
    if format_ is Format.JSON:
        print(json.dumps(figures.tree()))
        return
    console = stdout()
    for line in screen(figures, View(), console.width, 24):
        if line.plain and line.plain != KEYS:
            console.print(line)


class _Live:
    """One run on a terminal, with a connected client."""

    def __init__(self, client: Client, interval: float, engine: str) -> None:
        self._client, self._interval, self._engine = client, interval, engine
        self._console = Console(highlight=False)
        self._samples, self._view = Samples(engine), View()
        self._figures: Figures | None = None
        self._keys: asyncio.Queue[str] = asyncio.Queue()
        self._lost_at = ""  # when the daemon did not answer any more

    async def run(self) -> None:
        """Draw until `q`. If the daemon goes away, wait for its return."""
        loop = asyncio.get_running_loop()
        with _raw_keys(self._keys), self._console.screen(hide_cursor=True):
            await self._look()
            due = loop.time() + self._interval
            while True:
                self._draw()
                try:
                    async with timeout_at(due):
                        key = await self._keys.get()
                except TimeoutError:
                    due = loop.time() + self._interval
                    if not self._view.paused:
                        await self._look()
                    continue
                if key == "quit":
                    return
                await self._pressed(key)

    async def _look(self) -> None:
        """Fetch new figures. After an error the old ones stay, and the screen says what went wrong."""
        try:
            async with timeout(5 + self._interval):
                report, rows = await self._client.stats(), await self._client.tasks("recent", ROWS, self._engine)
        except (TransferError, TimeoutError) as error:
            self._lost_at = self._lost_at or time.strftime("%H:%M:%S")
            why = error or "no answer in time"
            self._view.problem = f"the daemon does not answer since {self._lost_at}, these figures are old: {why}"
            return
        self._lost_at = ""
        self._view.problem = ""
        self._figures = self._samples.add(read(report), rows)

    async def _pressed(self, key: str) -> None:
        view = self._view
        if view.story is not None:
            if key in ("back", "enter"):
                view.story = None
            elif key in ("up", "down"):
                view.scrolled = max(0, min(len(view.story) - 1, view.scrolled + (1 if key == "down" else -1)))
        elif key == "pause":
            view.paused = not view.paused
        elif key == "sort":
            view.sort = SORTS[(SORTS.index(view.sort) + 1) % len(SORTS)]
        elif key in ("up", "down"):
            self._choose(1 if key == "down" else -1)
        elif key == "enter" and view.chosen is not None:
            await self._explain(*view.chosen)

    def _choose(self, step: int) -> None:
        rows = [] if self._figures is None else ordered(self._figures.rows, self._view.sort)
        ids = [(str(row["engine"]), str(row["task_id"])) for row in rows]
        if ids:
            place = ids.index(self._view.chosen) + step if self._view.chosen in ids else 0
            self._view.chosen = ids[max(0, min(len(ids) - 1, place))]

    async def _explain(self, engine: str, task_id: str) -> None:
        try:
            async with timeout(5):
                story = as_text(await self._client.explain(task_id, engine))
        except (TransferError, TimeoutError) as error:
            story = str(error) or "no answer in time"
        self._view.story, self._view.scrolled = story.splitlines(), 0

    def _draw(self) -> None:
        width, height = self._console.size
        lines = screen(self._figures, self._view, width, height)
        self._console.control(Control.home())
        whole = Text("\n").join(_padded(line, width) for line in lines)  # no newline at the end: it would scroll
        self._console.print(whole, end="", no_wrap=True, crop=True)


def _padded(line: Text, width: int) -> Text:
    line.pad_right(max(0, width - line.cell_len))
    return line


@contextlib.contextmanager
def _raw_keys(keys: asyncio.Queue[str]) -> Iterator[None]:
    """Read keys as they are pressed, without echo. Restores the terminal at the end."""
    descriptor, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    before = termios.tcgetattr(descriptor)

    def read() -> None:
        pressed = os.read(descriptor, 64).decode("ascii", "replace")
        if not pressed:  # the terminal is gone
            keys.put_nowait("quit")
        for key in [pressed] if pressed.startswith("\x1b") else pressed:
            if key in _KEYS:
                keys.put_nowait(_KEYS[key])

    try:
        tty.setcbreak(descriptor)
        loop.add_reader(descriptor, read)
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
