"""What a node lends to its pool when each rank lends a part, as each of FastDeploy's transfer processes does.

The client has lent one segment when it joins. Each further rank that is served at the same time adds one; engines that
one process registers for the same rank count once, as for objects of several sizes. Segments stay until the daemon
ends: an engine that starts again finds the room, and what is in it, as before.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable

import structlog

from transferd.config import MooncakeStorageSection
from transferd.errors import StorageError
from transferd.runtime.aio import Background
from transferd.storage.mooncake.client import PoolClient
from transferd.storage.mooncake.error_codes import describe
from transferd.tiers.base import HostMemory

log = structlog.get_logger(__name__)


class Segments:
    """Counts the ranks that are served and, with segment_per_rank, lends memory for each further one at a time.

    call: runs a blocking call with the client in a thread.
    """

    def __init__(
        self, section: MooncakeStorageSection, call: Callable[[Callable[[PoolClient], int]], Awaitable[int]]
    ) -> None:
        self._nbytes = int(section.global_segment_size) if section.segment_per_rank else 0
        self._call = call
        self._served: dict[int, Hashable] = {}  # lenders, by the address of their staging memory
        self._running = Background(awaited=False)
        self.lent = 1  # or being lent

    def began(self, memory: HostMemory) -> None:
        """The rank with this staging memory is served from now on."""
        if memory.lender is not None:
            self._served[memory.address] = memory.lender
        if self._nbytes and len(set(self._served.values())) > self.lent:
            self.lent += 1
            self._running.begin(self._lend(memory.rank))

    def ended(self, memory: HostMemory) -> None:
        """The rank with this staging memory is served no more."""
        self._served.pop(memory.address, None)

    async def _lend(self, rank: int) -> None:
        try:
            code = await self._call(lambda client: client.lend(self._nbytes, rank))
            problem = describe(code) if code else ""
        except StorageError as error:
            problem = str(error)
        if problem:
            self.lent -= 1  # the next rank that begins tries again
            log.warning("the pool gets no segment for a further rank", bytes=self._nbytes, problem=problem)
