"""Work that must end before its caller goes on, also when the caller is cancelled meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def uncancelled(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end and return what it returns.

    A cancellation of the caller is held back until then and raised afterwards; the work does not see
    it. This is how a storage call keeps its hold on a caller's buffers for as long as a thread may
    still touch them. The work must be bounded in time by itself.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError:
                continue  # the first cancellation is raised below, once
        if not task.cancelled():
            task.exception()  # seen: nobody is left to hear of it
        raise


async def every(works: Iterable[Awaitable[T]]) -> list[T]:
    """Their results in order; if any raises, the first error in that order, after all have ended.

    asyncio.gather alone raises at the first error, or at the first cancelled one, and leaves the others
    running behind its caller's back: on memory and in storage that the caller believes is free of them.
    An error of the iterable itself, which may start one work after another, comes after those that it
    had started. A cancellation of the caller reaches all of them and is raised when all have ended.
    """
    begun: list[asyncio.Future[T]] = []
    refused: Exception | None = None
    try:
        for work in works:
            begun.append(asyncio.ensure_future(work))  # noqa: PERF401 - what has begun is kept when the next raises
    except Exception as error:  # noqa: BLE001 - raised below
        refused = error
    results: list[T] = []
    for ended in await asyncio.gather(*begun, return_exceptions=True):
        if isinstance(ended, BaseException):
            raise ended
        results.append(ended)
    if refused is not None:
        raise refused
    return results
