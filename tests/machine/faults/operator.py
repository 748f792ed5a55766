"""The runner's own client: prepares, watches, and reads everything back.

It remembers every key that anybody was told to write, and whether a result ever called it stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Sequence
from typing import Any

from tests.integration.caches import attach, wipe
from tests.machine.faults.cell import TASK_TIMEOUT_S, Row
from tests.machine.faults.contents import DEVICE_BLOCKS, RANKS, holds_content, write_content
from tests.support.looking import new_stats
from transferd import Client, ReadStorageTask, Status, TaskResult, TransferError, WriteStorageTask
from transferd.runtime.compat import timeout

CONNECT_TIMEOUT_S = 30.0
POLL_S = 0.1  # for what has no event to wait for: a pool that recovers, background work that ends
SETTLE_S = 15.0
REMEMBERED = 96  # keys read back after a cell, the newest


class Operator:
    """See the module. Owns its client between `open` and `close`."""

    def __init__(self, endpoint: str) -> None:
        self.client = Client(endpoint, connect_timeout=CONNECT_TIMEOUT_S)
        self._keys: dict[str, bool] = {}  # was it ever called stored, and not yet found gone?
        self._boot = ""
        self._caches: Any = None
        self._numbers = itertools.count()
        self.submitted = 0

    async def open(self) -> None:
        await self.client.connect()

    async def close(self) -> None:
        await self.client.close()

    # --- keys ---------------------------------------------------------------------------------------

    def expect(self, keys: Sequence[str]) -> None:
        """Somebody is going to write these."""
        for key in keys:
            self._keys.setdefault(key, False)

    def stored(self, keys: Sequence[str]) -> None:
        """A result called these stored."""
        self._keys |= dict.fromkeys(keys, True)

    @property
    def known(self) -> dict[str, bool]:
        """Every key, and whether a result has called it stored."""
        return dict(self._keys)

    # --- tasks --------------------------------------------------------------------------------------

    async def write(self, keys: list[str], blocks: list[int], timeout: float = TASK_TIMEOUT_S) -> TaskResult:
        """Fill blocks with what belongs under the keys, and store them."""
        caches = await self._attached()
        for key, block in zip(keys, blocks, strict=True):
            write_content(caches, block, key)
        self.expect(keys)
        result = await self._submit(WriteStorageTask, keys, blocks, timeout)
        self.stored([key for key, block in zip(keys, blocks, strict=True) if block in result.block_ids])
        return result

    async def read(self, keys: list[str], blocks: list[int], timeout: float = TASK_TIMEOUT_S) -> TaskResult:
        """Load keys into blocks that hold nothing before."""
        wipe(await self._attached(), blocks)
        return await self._submit(ReadStorageTask, keys, blocks, timeout)

    async def _submit(
        self,
        kind: type[ReadStorageTask | WriteStorageTask],
        keys: list[str],
        blocks: list[int],
        timeout: float,
    ) -> TaskResult:
        self.submitted += 1
        task_id = f"operator-{next(self._numbers)}"
        return await self.client.submit(kind(task_id=task_id, keys=keys, gpu_block_ids=blocks, timeout=timeout))

    def wrong_blocks(self, result: TaskResult, keys: list[str], blocks: list[int]) -> list[int]:
        """Those that the result of a read claims and that do not hold what belongs under their keys."""
        claimed = set(result.block_ids)
        pairs = zip(keys, blocks, strict=True)
        return [b for key, b in pairs if b in claimed and not holds_content(self._caches, b, key)]

    async def _attached(self) -> Any:
        if self.client.boot_id != self._boot:
            self._caches = await attach(self.client, RANKS)
            self._boot = self.client.boot_id
        return self._caches

    # --- checks -------------------------------------------------------------------------------------

    async def resumed(self, within: float) -> None:
        """Undo a pause of the daemon that lives now; asked again where a dead one was asked. Raises TimeoutError."""
        async with timeout(within):
            while True:
                with contextlib.suppress(TransferError):
                    await self.client.wait_ready(within)
                    await self.client.resume()
                    return
                await asyncio.sleep(POLL_S)

    async def served(self, within: float) -> None:
        """Wait until a new block can be written and read back. Raises TimeoutError saying what came last."""
        last: object = None
        try:
            async with timeout(within):
                while True:
                    try:
                        last = await self._round_trip(within)
                        if last is None:
                            return
                    except TransferError as error:
                        last = error
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise TimeoutError(f"the daemon did not serve within {within:g} s; last: {last}") from None

    async def _round_trip(self, within: float) -> TaskResult | None:
        """None when it went well."""
        await self.client.wait_ready(within)
        key = f"probe-{next(self._numbers)}"
        written = await self.write([key], [0])
        if written.status is not Status.OK:
            return written
        loaded = await self.read([key], [1])
        return None if loaded.status is Status.OK and holds_content(self._caches, 1, key) else loaded

    async def read_everything_back(self, row: Row, within: float) -> None:
        """Every key is right or a miss. A pool that has lost a segment needs a while to know: errors are asked again.

        Raises TimeoutError when some key is still answered with an error after `within` seconds.
        """
        open_, last = list(self._keys)[-REMEMBERED:], None
        row.checked += len(open_)
        try:
            async with timeout(within):
                while open_:
                    open_, last = await self._read_back(open_, row)
                    if open_:
                        await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise TimeoutError(f"{len(open_)} keys cannot be read within {within:g} s; last: {last}") from None

    async def _read_back(self, keys: list[str], row: Row) -> tuple[list[str], TaskResult | None]:
        """One look at each. Returns the keys that were answered with an error."""
        failed, last = [], None
        for some in (keys[i : i + DEVICE_BLOCKS] for i in range(0, len(keys), DEVICE_BLOCKS)):
            results = await asyncio.gather(*(self.read([key], [block]) for block, key in enumerate(some)))
            for block, (key, result) in enumerate(zip(some, results, strict=True)):
                if result.status is Status.OK:
                    if not holds_content(self._caches, block, key):
                        row.wrong += 1
                        row.problems.append(f"{key} was read back wrong")
                elif result.status is Status.MISS:
                    row.gone += self._keys[key]
                    self._keys[key] = False
                else:
                    failed.append(key)
                    last = result
        return failed, last

    async def results_missing(self) -> list[str]:
        """Each task that this operator, the only client, submitted has ended once, as the daemon counts."""
        give_up = time.monotonic() + SETTLE_S
        while (ended := sum((await self.client.stats())["tasks"].values())) < self.submitted:
            if time.monotonic() > give_up:
                break
            await asyncio.sleep(POLL_S)  # a busy daemon answers with a report of a moment ago
        return [] if ended == self.submitted else [f"{self.submitted} tasks were submitted, {ended} have ended"]

    async def left_over(self, damaged: int = 0) -> list[str]:
        """What should be nothing, once everything has been answered, and is something.

        damaged: how many objects should have been found unreadable.
        """
        await self.client.drain()
        await self.client.resume()
        left: list[str] = ["not asked"]
        with contextlib.suppress(TimeoutError):
            async with timeout(SETTLE_S):  # I/O that nobody waits for any more may still run, on staging alone
                while left:
                    stats = await new_stats(self.client)
                    counts = {name: stats[name] for name in ("queued", "running", "straggling")}
                    counts |= {"staging": stats["staging"]["used"], "corrupt": stats["storage"]["corrupt"] - damaged}
                    counts |= {f"background of rank {rank['rank']}": rank["background"] for rank in stats["ranks"]}
                    left = [f"{name} is {count} at the end" for name, count in counts.items() if count]
                    if left:
                        await asyncio.sleep(POLL_S)
        return left
