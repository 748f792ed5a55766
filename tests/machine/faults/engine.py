"""An engine in a process of its own: pushes tasks through the real client and writes down what it is told.

It attaches once and goes on with what it has mapped, also when the daemon behind it has been replaced: it does its
next task in the old memory first, and maps the new memory only then.

    python -m tests.machine.faults.engine ENDPOINT JOURNAL

At the gate "idle" it is told what to do next: a task as JSON (kind, task_id, keys, blocks, timeout), or
"end". The journal has one JSON line for each event, with the system-wide monotonic time:

    {"event": "went on", "task_id": …, "status": …, "code": …, "blocks": n}    in memory of a daemon that is gone
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

from tests.integration.caches import Caches, attach, wipe
from tests.machine.faults.contents import RANKS, holds_content, write_content
from tests.machine.faults.gates import gate
from transferd import Client, ReadStorageTask, TaskResult, WriteStorageTask

CONNECT_TIMEOUT_S = 30.0


class Journal:
    """Lines that are in the kernel's hands when `note` returns, so that kill -9 loses none."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(self, event: str, **more: Any) -> None:
        os.write(self._fd, json.dumps({"t": time.monotonic(), "event": event, **more}).encode() + b"\n")


class Engine:
    """caches: what it has mapped, of the daemon `boot_id`."""

    def __init__(self, client: Client, journal: Journal) -> None:
        self._client = client
        self._journal = journal
        self._caches: Caches = []
        self._boot_id = ""

    async def carry_out(self, order: dict[str, Any]) -> None:
        client, journal = self._client, self._journal
        await client.wait_ready(CONNECT_TIMEOUT_S)
        boot_id, _ = await client.ping()
        if not self._caches:
            self._caches, self._boot_id = await attach(client, RANKS), boot_id
        elif boot_id != self._boot_id:
            await self._go_on(order)
            renewed = await client.reattach(CONNECT_TIMEOUT_S)
            self._caches, self._boot_id = [renewed[rank] for rank in range(RANKS)], boot_id
        asked = asyncio.ensure_future(client.submit(self._prepared(order)))
        told = asyncio.ensure_future(_told(asked, journal, order, self._caches))
        await asyncio.sleep(0)  # its first step hands the request to the socket
        journal.note("pushed", task_id=order["task_id"])
        await gate("push")
        await told

    async def _go_on(self, order: dict[str, Any]) -> None:
        """As an engine does that has not noticed: what it calls stored must hold what it has in its own memory."""
        result = await self._client.submit(self._prepared(order | {"task_id": f"{order['task_id']}-old"}))
        self._journal.note(
            "went on",
            task_id=order["task_id"],
            status=str(result.status),
            code=result.error.code if result.error else "",
            blocks=len(result.block_ids),
        )

    def _prepared(self, order: dict[str, Any]) -> ReadStorageTask | WriteStorageTask:
        """The task, once its blocks hold what belongs under its keys, or nothing if they are to be read."""
        keys, blocks = order["keys"], order["blocks"]
        if order["kind"] == "write":
            for key, block in zip(keys, blocks, strict=True):
                write_content(self._caches, block, key)
        else:
            wipe(self._caches, blocks)
        kind = WriteStorageTask if order["kind"] == "write" else ReadStorageTask
        return kind(task_id=order["task_id"], keys=keys, gpu_block_ids=blocks, timeout=order["timeout"])


async def _told(asked: asyncio.Future[TaskResult], journal: Journal, order: dict[str, Any], caches: Caches) -> None:
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
        engine = Engine(client, journal)
        while (word := await gate("idle")) not in ("end", ""):
            await engine.carry_out(json.loads(word))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Journal(Path(sys.argv[2]))))
