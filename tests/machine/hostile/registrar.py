"""A user with many engines: `python -m tests.machine.hostile.registrar UID ENDPOINT NAME COUNT`.

Prints what came of each registration, `ok` or the code of the refusal, and keeps the engines until its input ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

from tests.machine.hostile.accounts import become, preload
from transferd import Client, Engine, Pages, TransferError

LAYOUT = Pages(layers=1, page_bytes=64, blocks=2, identity="of the registrar")


async def register(endpoint: str, name: str, count: int) -> None:
    async with contextlib.AsyncExitStack() as stack:
        came = []
        for number in range(count):
            one = Client(endpoint, engine=f"{name}-{number}", await_ready=False)
            client = await stack.enter_async_context(one)
            try:
                await client.register(Engine(ranks=1, model="m", layout=LAYOUT))
                stack.push_async_callback(client.unregister)
                came.append("ok")
            except TransferError as error:
                came.append(error.reason)
        print(*came, flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    uid, endpoint, name, count = sys.argv[1:]
    preload()
    become(int(uid), int(uid), [])
    asyncio.run(register(endpoint, name, int(count)))
