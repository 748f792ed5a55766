"""What transferd logs in this process: kept for a test to look at, or left out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from transferd.observability import logs


class Kept(logs.Log):
    """Takes the place of the log. lines: each event with its details and its `log_level`, as the caller gave them."""

    def __init__(self) -> None:
        super().__init__(logs.LogWriter(logs.STDERR), level="debug")
        self.lines: list[dict[str, Any]] = []

    def take(self, level: str, kind: object, event: logs.Event) -> None:
        self.lines.append({**event, "log_level": level})


class Printed(logs.Log):
    """Prints at once, so that pytest shows it with a test that fails."""

    def __init__(self) -> None:
        super().__init__(logs.LogWriter(logs.STDERR), format_="console")

    def _put(self, level: str, text: str) -> None:
        print(text)

    def say(self, level: str, text: str) -> None:
        """What a command says to people goes to stderr, as ever."""
        logs.Log(self.writer).say(level, text)


@contextlib.contextmanager
def installed(log: logs.Log) -> Iterator[None]:
    """Everything that is logged meanwhile goes to this log."""
    before, logs._log = logs._log, log
    try:
        yield
    finally:
        logs._log = before


@contextlib.contextmanager
def capture_logs() -> Iterator[list[dict[str, Any]]]:
    """What is logged meanwhile, instead of writing it."""
    kept = Kept()
    with installed(kept):
        yield kept.lines


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Log nothing meanwhile: a daemon under faults logs every one of them."""
    with installed(logs.Log(logs.LogWriter(logs.STDERR), level="critical")):
        yield
