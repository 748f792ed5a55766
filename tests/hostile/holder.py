"""An engine of another user that only exists: `python holder.py UID ENDPOINT ENGINE`. It leaves when its input ends."""

from __future__ import annotations

import asyncio
import os
import sys

from tests.integration.as_user import ITS_OWN
from transferd import Client


async def hold(endpoint: str, engine: str) -> None:
    async with Client(endpoint, engine=engine, await_ready=False) as client:
        await client.register(ITS_OWN)
        print("registered", flush=True)
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), ended.set)
        await ended.wait()


if __name__ == "__main__":
    os.setgroups([])
    os.setgid(int(sys.argv[1]))
    os.setuid(int(sys.argv[1]))
    asyncio.run(hold(*sys.argv[2:]))
