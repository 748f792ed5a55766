"""An engine of another user that only exists: `python -m tests.machine.hostile.holder UID ENDPOINT ENGINE [GROUP]`.

It leaves when its input ends.
"""

from __future__ import annotations

import asyncio
import sys

from tests.integration.as_user import ITS_OWN
from tests.machine.hostile.accounts import become
from transferd import Client


async def hold(endpoint: str, engine: str) -> None:
    async with Client(endpoint, engine=engine, await_ready=False) as client:
        await client.register(ITS_OWN)
        print("registered", flush=True)
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), ended.set)
        await ended.wait()


if __name__ == "__main__":
    uid, endpoint, engine, *groups = sys.argv[1:]
    become(int(uid), int(uid), [int(group) for group in groups])
    asyncio.run(hold(endpoint, engine))
