"""Walk a task through the daemon: which files its calls are in, and how often they change from file to file.

    python scripts/walk_task.py [--calls]

One block is swapped out and in, one is written to storage in memory, one to memory above files, with its copy below,
and one is read from storage in files. The client runs on a thread of its own, which is not counted; of several tasks
the shortest way counts, so that nothing is loaded or made for the first time. Counts calls into transferd/ on the
daemon's event loop, resumed coroutines included, but not its I/O threads.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from transferd import ReadStorageTask, Status, SwapInTask, SwapOutTask, SyncClient, WriteStorageTask  # noqa: E402
from transferd.config import Config, from_tree  # noqa: E402
from transferd.daemon.daemon import Daemon  # noqa: E402
from transferd.tasks import Task  # noqa: E402

PACKAGE = str(ROOT / "transferd") + "/"


@dataclass
class Walk:
    """The calls of one task on the daemon's loop, in order, as (file, function)."""

    calls: list[tuple[str, str]] = field(default_factory=list)

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            self.calls.append(
                (
                    frame.f_code.co_filename.removeprefix(PACKAGE),
                    getattr(frame.f_code, "co_qualname", frame.f_code.co_name),
                )
            )

    @property
    def files(self) -> list[str]:
        """Every file, in the order of the first call into it."""
        return list(dict.fromkeys(file for file, _ in self.calls))

    @property
    def changes(self) -> int:
        """How often a call is in another file than the call before it."""
        files = [file for file, _ in self.calls]
        return sum(a != b for a, b in itertools.pairwise(files))


def _config(directory: Path, *levels: str) -> Config:
    cache = {"ranks": 1, "layers": 2, "kv_heads": 1, "head_dim": 16, "device_blocks": 4, "host_blocks": 4}
    files = {"file": {"path": str(directory / "blocks"), "capacity": 1 << 20}} if "file" in levels else {}
    which = {"backend": levels[0]} if len(levels) == 1 else {"levels": list(levels)}
    return from_tree(
        {
            "server": {"endpoint": f"ipc://{directory}/t.sock"},
            "cache": cache,
            "storage": {**which, **files},
            "metrics": {"listen": ""},
        }
    )


async def _shortest(config: Config, setup: Sequence[Task], tasks: Iterable[Task]) -> Walk:
    """The shortest way of one of these tasks. The others also counted what came between: a heartbeat, a timer."""
    daemon = Daemon(config)
    await daemon.open()
    client = SyncClient(config.server.endpoints[0])
    walks: list[Walk] = []
    try:
        await asyncio.to_thread(client.connect)
        await asyncio.to_thread(client.attach, rank=0)
        for task in setup:
            assert (await asyncio.to_thread(client.submit, task)).status is Status.OK, task
        for task in tasks:
            walks.append(Walk())
            sys.setprofile(walks[-1])
            result = await asyncio.to_thread(client.submit, task)
            while getattr(daemon.storage, "unsaved", None):  # noqa: ASYNC110 - until the levels below have it
                await asyncio.sleep(0.001)
            sys.setprofile(None)
            assert result.status is Status.OK, result
    finally:
        sys.setprofile(None)
        await asyncio.to_thread(client.close)
        await daemon.stop(lambda: 5.0)
    return min(walks, key=lambda walk: (len(walk.files), len(walk.calls)))


def _writes(count: int) -> list[Task]:
    return [WriteStorageTask(task_id=f"w{n}", keys=[f"k{n}"], gpu_block_ids=[n % 4]) for n in range(count)]


def _swaps(kind: type[SwapOutTask | SwapInTask], count: int) -> list[Task]:
    return [kind(task_id=f"{kind.lane}{n}", gpu_block_ids=[n % 4], cpu_block_ids=[n % 4]) for n in range(count)]


async def walk_write(directory: Path, tasks: int = 8) -> Walk:
    """Write one block, whose key is new, on one rank with storage in memory."""
    return await _shortest(_config(directory, "memory"), [], _writes(tasks))


async def walk_swap_out(directory: Path, tasks: int = 8) -> Walk:
    """Copy one block to the host on one rank."""
    return await _shortest(_config(directory, "memory"), [], _swaps(SwapOutTask, tasks))


async def walk_swap_in(directory: Path, tasks: int = 8) -> Walk:
    """Copy one block back from the host on one rank."""
    return await _shortest(_config(directory, "memory"), _swaps(SwapOutTask, 4), _swaps(SwapInTask, tasks))


async def walk_levels(directory: Path, tasks: int = 8) -> Walk:
    """Write one block to memory above files, until the files have it."""
    return await _shortest(_config(directory, "memory", "file"), [], _writes(tasks))


async def walk_read(directory: Path, tasks: int = 8) -> Walk:
    """Read one block on one rank with storage in files."""
    reads = [ReadStorageTask(task_id=f"r{n}", keys=["k0"], gpu_block_ids=[n % 4]) for n in range(tasks)]
    return await _shortest(_config(directory, "file"), _writes(1), reads)


WALKS = {
    "a swap out": walk_swap_out,
    "a swap in": walk_swap_in,
    "a write": walk_write,
    "a write to levels": walk_levels,
    "a read of a file": walk_read,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", action="store_true", help="print every call, too")
    options = parser.parse_args()
    for name, walked in WALKS.items():
        with tempfile.TemporaryDirectory(prefix="transferd-walk-") as directory:
            walk = asyncio.run(walked(Path(directory)))
        if options.calls:
            for file, function in walk.calls:
                print(f"{file:40} {function}")
        print(f"{name}: {len(walk.files)} files, {len(walk.calls)} calls, {walk.changes} changes of file")


if __name__ == "__main__":
    main()
