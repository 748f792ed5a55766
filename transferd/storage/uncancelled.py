"""Work that must end before its caller goes on, also when the caller is cancelled meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
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
