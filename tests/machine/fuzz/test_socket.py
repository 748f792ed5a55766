"""The daemon's socket under random and mutated messages: it lives, stays small, and serves every honest client.

MESSAGES says how many (`make fuzz` sends a million; CI: the default).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.machine.fuzz.frames import HOSTILE_BLOCKS, Frames
from tests.support.waits import until
from transferd import Client, ReadStorageTask, Status, WriteStorageTask
from transferd.client.launch import running

ROOT = Path(__file__).parents[3]
MESSAGES = int(os.environ.get("MESSAGES", "10000"))
HONEST = 3
BLOCKS_EACH = 8
STORMS = 5  # as long as each other: a peer who does not read leaves as many answers unread in each
FILLING = 2  # of them fill what is bounded: answers that wait for peers who do not read them, results, the recorder
# Bytes of resident memory that a daemon may take after these. Short ones do not fill everything.
GROWTH = (12 if MESSAGES >= 500_000 else 24) * 1024**2


@dataclass
class Size:
    """What a process holds."""

    resident: int
    threads: int
    descriptors: int

    @classmethod
    def of(cls, pid: int) -> Size:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return cls(int(status["VmRSS"].split()[0]) * 1024, int(status["Threads"]), len(os.listdir(f"/proc/{pid}/fd")))


@dataclass
class Honest:
    """A client that does its work meanwhile, and checks every byte."""

    number: int
    client: Client
    done: int = 0
    slowest: float = 0.0
    caches: list[dict[str, list[Any]]] = field(default_factory=list)

    async def work(self) -> None:
        first = self.number * BLOCKS_EACH
        source, target = [first, first + 1], [first + 2, first + 3]
        self.caches = [await self.client.attach(rank) for rank in range(2)]
        values = np.random.default_rng(self.number)
        while True:
            began = asyncio.get_running_loop().time()
            for raw in self._raw(source):
                raw[:] = values.integers(0, 256, raw.shape, dtype=np.uint8)
            name = f"honest {self.number} {self.done}"
            keys = [f"{name} {i}" for i in range(2)]
            written = await self.client.submit(WriteStorageTask(task_id=f"{name} w", keys=keys, gpu_block_ids=source))
            assert written.status is Status.OK, written
            assert await self.client.match(keys) == 2
            read = await self.client.submit(ReadStorageTask(task_id=f"{name} r", keys=keys, gpu_block_ids=target))
            assert read.status is Status.OK, read
            for one, other in zip(self._raw(source), self._raw(target), strict=True):
                assert np.array_equal(one, other)
            self.slowest = max(self.slowest, asyncio.get_running_loop().time() - began)
            self.done += 1
            await asyncio.sleep(0.02)

    def _raw(self, blocks: list[int]) -> list[Any]:
        return [
            array[block].reshape(-1).view(np.uint8)
            for cache in self.caches
            for layers in cache.values()
            for array in layers
            for block in blocks
        ]


def config() -> dict[str, dict[str, Any]]:
    cache = {"ranks": 2, "layers": 2, "kv_heads": 1, "head_dim": 16, "block_size": 4}
    return {
        # Small bounds, so that everything bounded is full before the second measurement.
        "server": {"max_queued_tasks": 256, "max_results": 512, "max_message": "1MiB", "client_timeout": 5.0},
        "cache": cache | {"device_blocks": HOSTILE_BLOCKS.stop, "host_blocks": HOSTILE_BLOCKS.stop},
        "host": {"staging": "1MiB"},
        "storage": {"backend": "memory", "memory": {"capacity": "2MiB"}},
        "log": {"level": "warning"},
    }


async def storm(endpoint: str, messages: int, seed: int) -> dict[str, int]:
    """An attacker in a process of its own; what it says at the end."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.machine.fuzz.attacker", endpoint, str(messages), str(seed)),
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    try:
        out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, "the attacker gave up: the daemon stopped reading"
    said: dict[str, int] = json.loads(out)
    return said


@pytest.mark.timeout(0 if MESSAGES > 100_000 else 300)
def test_a_million_bad_messages_hurt_nobody(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def main(endpoint: str, pid: int) -> str:
        honest = [Honest(number, Client(endpoint)) for number in range(HONEST)]
        async with contextlib.AsyncExitStack() as stack:
            for one in honest:
                await stack.enter_async_context(one.client)
            working = [asyncio.ensure_future(one.work()) for one in honest]
            await until(lambda: all(one.done for one in honest), "all are served")
            at_rest = Size.of(pid)
            storms = [await storm(endpoint, MESSAGES // STORMS, seed) for seed in range(FILLING)]
            before, served = Size.of(pid), [one.done for one in honest]
            storms += [await storm(endpoint, MESSAGES // STORMS, seed) for seed in range(FILLING, STORMS)]
            after, stats = Size.of(pid), await honest[0].client.stats()
            left = "the connections of those who have left are closed"
            await until(lambda: Size.of(pid).descriptors <= at_rest.descriptors + 8, left)
            for task in working:
                assert not task.done(), task.exception()
                task.cancel()
            await asyncio.wait(working)
            for one in honest:
                one.caches.clear()
        sent, requests = (sum(storm[what] for storm in storms) for what in ("sent", "requests"))
        assert sent >= MESSAGES
        assert stats["server"]["messages"] >= sent, "each was read"
        assert sum(stats["rejects"].values()) >= sent // 4
        assert all(one.done > before_ for one, before_ in zip(honest, served, strict=True)), "an honest client starved"
        assert after.resident - before.resident < GROWTH, (before, after)
        assert after.threads == before.threads
        return (
            f"{sent} messages, {requests} of them requests; honest clients were served "
            f"{[one.done for one in honest]} times, slowest {max(one.slowest for one in honest):.3f} s; "
            f"memory {before.resident >> 20} MiB, then {after.resident >> 20} MiB"
        )

    with running(config(), tmp_path) as daemon:
        told = asyncio.run(main(daemon.endpoint, daemon.pid))
        assert daemon.process.poll() is None
        assert "InvariantError" not in daemon.log
        assert "Traceback" not in daemon.log, daemon.log[-2000:]
    with capfd.disabled():
        print(f"\n{told}")


def test_frames_are_a_function_of_their_seed_and_mostly_bad() -> None:
    one, other = Frames(3), Frames(3)
    drawn = [one.draw() for _ in range(2000)]
    assert drawn == [other.draw() for _ in range(2000)]
    assert len(set(drawn)) > 1000
    assert 100 < one.passed < 1500
