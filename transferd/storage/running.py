"""The calls of a storage that run now, and the objects that they are about."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Collection, Iterator


class RunningCalls:
    """Calls of one kind. Used on one event loop."""

    def __init__(self) -> None:
        self._calls: dict[asyncio.Future[None], Collection[str]] = {}  # by the end of each, its names

    @contextlib.contextmanager
    def of(self, names: Collection[str]) -> Iterator[None]:
        """A call about these objects runs within the `with` block."""
        ended = asyncio.get_running_loop().create_future()
        self._calls[ended] = names
        try:
            yield
        finally:
            del self._calls[ended]
            ended.set_result(None)

    @property
    def names(self) -> list[str]:
        return list(itertools.chain.from_iterable(self._calls.values()))

    @property
    def ends(self) -> Collection[asyncio.Future[None]]:
        return self._calls.keys()

    def has(self, name: str) -> bool:
        """Whether a call is about this object. Any thread may ask, once no new call about it can begin."""
        calls = list(self._calls.values())  # in one step, also for a thread: a tuple may collect garbage after it began
        return any(name in names for names in calls)

    async def without(self, names: Collection[str], within_s: float | None = None) -> None:
        """Wait until none of the calls that run now is about one of these objects, at most for so long."""
        if ends := [end for end, some in self._calls.items() if not set(names).isdisjoint(some)]:
            await asyncio.wait(ends, timeout=within_s)
