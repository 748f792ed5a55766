"""What the classes of calls that make up a client have in common (docs/adr/0117).

A Client inherits the calls about the store, the cache, the engine and reports from a class of each, so each call has
one definition. A GroupClient inherits some of these classes and asks all nodes; a SyncClient has their blocking forms.
"""

from __future__ import annotations

from typing import Any

from transferd.tasks import Task, TaskResult
from transferd.wire import protocol as wire

CONTROL_TIMEOUT_S = 30.0  # for a request that the daemon can answer at once
# Calls without a blocking form: SyncClient.start is that of `insist`, and the client's own parts use the others.
ASYNCIO_ONLY = frozenset({"insist", "retried", "withdraw"})


class Calls:
    """What calls are made of. The client defines it."""

    async def _ask(self, body: wire.ControlRequest, timeout: float = CONTROL_TIMEOUT_S) -> Any:
        """Send one request and wait for its value. Raises what control requests raise (Client)."""
        raise NotImplementedError

    async def wait_ready(self, timeout: float | None = None) -> None:
        raise NotImplementedError

    async def submit(self, task: Task) -> TaskResult:
        raise NotImplementedError

    async def cancel(self, task_id: str) -> bool:
        raise NotImplementedError
