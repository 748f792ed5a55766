"""Which loads and stores run now: background work yields to them, and objects being read are not overwritten."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from types import TracebackType

from transferd.runtime.compat import timeout


class Traffic:
    """Counts running calls: wrap each in `with traffic:`. Used on one event loop."""

    def __init__(self) -> None:
        self._under_way = 0
        self._read: list[frozenset[str]] = []  # the names of objects that running calls read
        self._read_ended: list[asyncio.Future[None]] = []  # wait for one of these calls to end
        self._waiting: list[asyncio.Future[None]] = []

    def __enter__(self) -> None:
        self._under_way += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._under_way -= 1
        if not self._under_way:
            for future in self._waiting:
                if not future.done():
                    future.set_result(None)

    @contextlib.contextmanager
    def reading(self, names: Sequence[str]) -> Iterator[None]:
        """Mark these objects as being read, within the `with` block."""
        group = frozenset(names)
        self._read.append(group)
        try:
            yield
        finally:
            self._read.remove(group)
            for future in self._read_ended:
                if not future.done():
                    future.set_result(None)

    async def unread(self, names: Sequence[str]) -> None:
        """Wait until none of the calls that run now reads one of these objects."""
        wanted = set(names)
        while any(not wanted.isdisjoint(group) for group in self._read):
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._read_ended.append(future)
            try:
                await future
            finally:
                self._read_ended.remove(future)

    def reads(self, name: str) -> bool:
        """Whether this object is being read. Any thread may ask, once no new read of it can begin."""
        return any(name in group for group in tuple(self._read))

    async def quiet(self, patience: float) -> bool:
        """Wait for a moment without traffic, at most `patience` seconds. False: no such moment came."""
        if not self._under_way:
            return True
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        try:
            async with timeout(patience):  # wait_for can lose a cancellation that comes with the result
                await future
        except TimeoutError:
            return False
        finally:
            self._waiting.remove(future)
        return True
