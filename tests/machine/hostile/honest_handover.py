"""An engine that hands over blocks from one daemon to another while others attack them, and compares every byte.

    python -m tests.machine.hostile.honest_handover SPEC        a JSON object, see `Spec`

Peers of `pd.listen` have no users, so a handover may be refused while they flood it; then it is tried again. Prints
what honest_engine.py prints.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from dataclasses import dataclass

from tests.integration.caches import Caches, attach, fill, snapshot, wipe
from transferd import Client, HandoverFailed
from transferd.runtime.compat import timeout

TOKENS = list(range(1000, 1000 + 4 * 8 + 3))
SOURCES, TARGETS = [7, 3, 11, 2, 30], [1, 2, 3, 4, 5]
ANSWER_S, TRY_S, PAUSE_S = 40.0, 10.0, 0.2


@dataclass(frozen=True)
class Spec:
    """prefill, decode: endpoints. address: host:port of the first one's `pd.listen`."""

    prefill: str
    decode: str
    address: str
    name: str = "the handover"


class Handovers:
    def __init__(self, spec: Spec, prefill: Client, decode: Client) -> None:
        self._spec, self._prefill, self._decode = spec, prefill, decode
        self._number = 0
        self.done = 0

    async def run(self, stop: asyncio.Event) -> None:
        caches = [await attach(client) for client in (self._prefill, self._decode)]
        say("ready")
        while not stop.is_set():
            try:
                async with timeout(ANSWER_S):
                    while not await self._once(*caches):
                        pass
                self.done += 1
            except TimeoutError:
                say(f"wrong: no handover within {ANSWER_S:g} s")
            await asyncio.sleep(PAUSE_S)

    async def _once(self, source: Caches, target: Caches) -> bool:
        """Hand over; whether it was done. Its name is nobody else's to guess."""
        self._number += 1
        name = os.urandom(8).hex()
        fill(source, SOURCES, seed=self._number)
        wipe(target, list(range(32)))
        sending = self._prefill.write_all(name, TOKENS, SOURCES, timeout=TRY_S)
        receiving = self._decode.read_all(name, TOKENS, TARGETS, peer=self._spec.address, timeout=TRY_S)
        ends = await asyncio.gather(sending, receiving, return_exceptions=True)
        for end in ends:
            if isinstance(end, BaseException) and not isinstance(end, HandoverFailed):
                raise end
        if isinstance(ends[1], HandoverFailed):
            return False
        if snapshot(target, TARGETS) != snapshot(source, SOURCES):
            say("wrong: other bytes arrived")
        if any(any(block) for block in snapshot(target, [0, *range(6, 32)])):
            say("wrong: a block that no handover names was written to")
        return True


def say(line: str) -> None:
    print(line, flush=True)


async def main(spec: Spec) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), stop.set)
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(Client(endpoint)) for endpoint in (spec.prefill, spec.decode)]
        handovers = Handovers(spec, *clients)
        try:
            await handovers.run(stop)
        finally:
            say(f"done {handovers.done}")


if __name__ == "__main__":
    asyncio.run(main(Spec(**json.loads(sys.argv[1]))))
