"""SimTask: an asyncio task that can say where it waits, and whether anybody has heard how it failed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from contextvars import Context
from types import CodeType
from typing import Any, TypeVar

from transferd.runtime.compat import Task

T = TypeVar("T")


class SimTask(Task[T]):
    """A task with a number: its place in the order of creation, which is the same in every run."""

    def __init__(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        loop: asyncio.AbstractEventLoop,
        number: int,
        *,
        name: str | None,
        context: Context | None,
    ) -> None:
        # Before the first step is scheduled: the loop asks for both.
        self.number = number
        self.process = ""  # the loop sets it
        kind = getattr(coro, "__qualname__", type(coro).__qualname__).rpartition(".")[2]
        super().__init__(coro, loop=loop, name=name or f"{kind}-{number}", context=context)

    @property
    def unheard(self) -> bool:
        """It failed, and nobody has asked for its result."""
        return self.done() and not self.cancelled() and self._log_traceback

    def hear(self) -> BaseException | None:
        """Take note of how it ended, so that the interpreter does not tell it again."""
        return self.exception() if self.done() and not self.cancelled() else None

    def forget(self) -> None:
        """Nobody will ever ask for it, and that is well."""
        self.hear()
        self._log_destroy_pending = False

    @property
    def where(self) -> str:
        """The line at which it is suspended, in the innermost coroutine."""
        inner: Any = self.get_coro()
        code: CodeType | None = None
        line = 0
        while inner is not None:
            frame = getattr(inner, "cr_frame", None) or getattr(inner, "gi_frame", None)
            if frame is not None:
                code, line = frame.f_code, frame.f_lineno
            inner = getattr(inner, "cr_await", None) or getattr(inner, "gi_yieldfrom", None)
        if code is None:
            return "nowhere"
        return f"in {getattr(code, 'co_qualname', code.co_name)} ({code.co_filename.rpartition('/')[2]}:{line})"
