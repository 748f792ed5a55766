"""A client that runs as another user: imports as root, drops every privilege, then asks a daemon.

    python -m tests.integration.as_user UID GID GROUPS ENDPOINT TIMEOUT ENGINE ACTION…

GROUPS: comma-separated, or "-". ENGINE: the engine that it says it speaks for; "" for the daemon's own.

Prints one JSON object: each action and what came of it ("ok", or the code of the refusal), or
{"connect": "connect_timeout"}. The imports come first because another user may not read this installation.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from transferd import Client, Engine, Pages, ReadStorageTask, TransferError, WriteStorageTask
from transferd.runtime.compat import wait_for
from transferd.tiers.base import DeviceHandle

ITS_OWN = Engine(ranks=1, model="m", layout=Pages(layers=1, page_bytes=64, blocks=1, identity="another's"))

ACTIONS: dict[str, Callable[[Client], Awaitable[Any]]] = {
    "ping": lambda client: client.ping(),
    "stats": lambda client: client.stats(),
    "write": lambda client: client.submit(WriteStorageTask(task_id="w", keys=["k"], gpu_block_ids=[0])),
    "resume": lambda client: client.resume(),
    "read": lambda client: client.submit(ReadStorageTask(task_id="r", keys=["k"], gpu_block_ids=[0])),
    "exists": lambda client: client.exists(["k"]),
    "attach": lambda client: client.attach(0),
    "register": lambda client: client.register(ITS_OWN),
    "offer": lambda client: client.offer(0, DeviceHandle("shm", {})),
    "pause": lambda client: client.pause(),
    "clear": lambda client: client.clear_cache(),
    "generation": lambda client: client.set_generation("another's"),
    "unregister": lambda client: client.unregister(),
}


async def ask(endpoint: str, timeout: float, engine: str, actions: list[str]) -> dict[str, str]:
    """What comes of each action, for whoever this process is now."""
    told: dict[str, str] = {}
    client = Client(endpoint, engine=engine, connect_timeout=timeout, await_ready=not engine)
    try:
        await client.connect()
    except TransferError as error:
        return {"connect": error.reason}
    try:
        for name in actions:
            try:
                result = await wait_for(ACTIONS[name](client), 60)
            except TransferError as error:
                told[name] = error.reason
            else:
                error_info = getattr(result, "error", None)
                told[name] = "ok" if error_info is None else error_info.code
    finally:
        await client.close()
    return told


def main() -> None:
    uid, gid, groups, endpoint, timeout, engine, *actions = sys.argv[1:]
    os.setgroups([] if groups == "-" else [int(group) for group in groups.split(",")])
    os.setgid(int(gid))
    os.setuid(int(uid))
    print(json.dumps(asyncio.run(ask(endpoint, float(timeout), engine, actions))))


if __name__ == "__main__":
    main()
