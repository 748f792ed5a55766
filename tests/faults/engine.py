"""An engine in a process of its own: pushes tasks through the real client and writes down what it is told.

    python -m tests.faults.engine ENDPOINT JOURNAL

At the gate "idle" it is told what to do next: a task as JSON (kind, task_id, keys, blocks, timeout), or
"end". The journal has one JSON line for each event, with the system-wide monotonic time:

    {"event": "pushed", "task_id": …}
    {"event": "told", "task_id": …, "status": …, "code": …, "blocks": n, "right": …, "boot_id": …}

`right`: every block that the result of a read claims holds, at this moment, what belongs under its key.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tests.faults.contents import RANKS, holds_content, write_content
from tests.faults.gates import gate
from tests.integration.caches import attach, wipe
from transferd import Client, ReadStorageTask, TaskResult, WriteStorageTask

CONNECT_TIMEOUT_S = 30.0


class Journal:
    """Lines that are in the kernel's hands when `note` returns, so that kill -9 loses none."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(self, event: str, **more: Any) -> None:
        os.write(self._fd, json.dumps({"t": time.monotonic(), "event": event, **more}).encode() + b"\n")


async def carry_out(client: Client, journal: Journal, order: dict[str, Any]) -> None:
    await client.wait_ready(CONNECT_TIMEOUT_S)
    caches = await attach(client, RANKS)  # anew: another daemon has other memory
    keys, blocks = order["keys"], order["blocks"]
    kind = WriteStorageTask if order["kind"] == "write" else ReadStorageTask
    if order["kind"] == "write":
        for key, block in zip(keys, blocks, strict=True):
            write_content(caches, block, key)
    else:
        wipe(caches, blocks)
    task = kind(task_id=order["task_id"], keys=keys, gpu_block_ids=blocks, timeout=order["timeout"])
    asked = asyncio.ensure_future(client.submit(task))
    told = asyncio.ensure_future(_told(asked, journal, order, caches))
    await asyncio.sleep(0)  # its first step hands the request to the socket
    journal.note("pushed", task_id=task.task_id)
    await gate("push")
    await told


async def _told(asked: asyncio.Future[TaskResult], journal: Journal, order: dict[str, Any], caches: Any) -> None:
    result = await asked
    claimed = list(zip(order["keys"], order["blocks"], strict=True))[: len(result.block_ids)]
    right = order["kind"] == "write" or (
        result.block_ids == [block for _, block in claimed]
        and all(holds_content(caches, block, key) for key, block in claimed)
    )
    journal.note(
        "told",
        task_id=result.task_id,
        status=str(result.status),
        code=result.error.code if result.error else "",
        message=result.error.message if result.error else "",
        blocks=len(result.block_ids),
        stored=[key for key, block in zip(order["keys"], order["blocks"], strict=True) if block in result.block_ids],
        right=right,
        boot_id=result.boot_id,
    )


async def main(endpoint: str, journal: Journal) -> None:
    async with Client(endpoint, connect_timeout=CONNECT_TIMEOUT_S) as client:
        while (word := await gate("idle")) not in ("end", ""):
            await carry_out(client, journal, json.loads(word))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Journal(Path(sys.argv[2]))))
