"""What a terminal shows while a command waits for the daemon."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console

from tests.support.waits import until
from transferd.cli import terminal


class Reporting:
    """A client whose daemon reports ever less that is left."""

    left = 400

    async def stats(self) -> dict[str, Any]:
        self.left = max(0, self.left - 100)
        return {"storage": {"levels": [{"draining_bytes": self.left}, {"draining_bytes": 0}]}}


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    text = io.StringIO()
    monkeypatch.setattr(terminal, "Console", lambda **_: Console(file=text, force_terminal=True, width=100))
    monkeypatch.setattr(terminal, "LOOK_EVERY_S", 0.001)
    monkeypatch.setattr(terminal, "SLOW_S", 0.0)
    return text


async def test_a_figure_of_the_report_is_a_bar_that_ends(shown: io.StringIO) -> None:
    client = Reporting()
    async with terminal.progress(client, "draining_bytes"):  # type: ignore[arg-type]
        await until(lambda: client.left == 0 and "300/300 bytes" in shown.getvalue())
    assert "draining" in shown.getvalue()


async def test_a_wait_without_a_figure_says_how_long_it_takes(shown: io.StringIO) -> None:
    async with terminal.progress(Reporting(), ""):  # type: ignore[arg-type]
        await until(lambda: "waiting for the daemon" in shown.getvalue())
    assert re.search(r"\d:\d\d:\d\d", shown.getvalue())


async def test_what_is_answered_soon_shows_nothing(shown: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "SLOW_S", 60.0)
    async with terminal.progress(Reporting(), ""):  # type: ignore[arg-type]
        pass
    assert shown.getvalue() == ""
