"""Answers FastDeploy's control requests: one ControlResponse on every rank's queue."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from transferd.adapters.fastdeploy.arguments import TransferArguments
from transferd.runtime.compat import wait_for

log = logging.getLogger(__name__)

SEND_TIMEOUT_S = 10.0  # a queue accepts an answer at once if its engine listens


class Replies:
    """The queues on which the engine waits for one group's answers, one per rank. Used by one thread at a time."""

    def __init__(self, arguments: TransferArguments) -> None:
        from fastdeploy.inter_communicator.fmq import FMQ

        first = arguments.ranks * arguments.data_parallel_id
        names = [f"ctrl_c2e_rank{first + rank}_{arguments.cache_queue_port}" for rank in range(arguments.ranks)]
        self._queues = [FMQ().queue(name, "producer") for name in names]

    def send(self, request: Any, code: int, message: str) -> None:
        """Answer for every rank. code: 200 for done; with any other code from any rank, the engine raises an error."""
        from fastdeploy.engine.request import ControlResponse

        response = ControlResponse(request.request_id, code, message)

        async def put_all() -> None:
            for queue in self._queues:
                await wait_for(queue.put(response), SEND_TIMEOUT_S)

        try:
            asyncio.run(put_all())
        except TimeoutError:
            log.error("no engine takes the answer to the control request %s", request.request_id)

    def close(self) -> None:
        """Disconnect from the queues."""

        async def close_all() -> None:
            for queue in self._queues:
                await queue.close()

        asyncio.run(close_all())
