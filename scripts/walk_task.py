"""Walk one write task through the tree: which files its calls are in, and how often they change from file to file.

    python scripts/walk_task.py [--calls]

Client and daemon run in one process on one event loop; of several tasks the shortest way counts, so that nothing is
loaded or made for the first time. Counts calls into transferd/ on the event loop's thread, resumed coroutines included.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from transferd import Client, Status, WriteStorageTask  # noqa: E402
from transferd.config import from_tree  # noqa: E402
from transferd.daemon.daemon import Daemon  # noqa: E402

PACKAGE = str(ROOT / "transferd") + "/"


@dataclass
class Walk:
    """The calls of one task, in order, as (file, function)."""

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


async def walk_write(directory: Path, tasks: int = 8) -> Walk:
    """Write one block, whose key is new, on one rank with storage in memory; the shortest way of several such tasks.

    The others also counted what happened to come between: a heartbeat, a timer, a collected object.
    """
    endpoint = f"ipc://{directory}/t.sock"
    tree = {
        "server": {"endpoint": endpoint},
        "cache": {"ranks": 1, "layers": 2, "kv_heads": 1, "head_dim": 16, "device_blocks": 4, "host_blocks": 0},
        "storage": {"backend": "memory"},
        "metrics": {"listen": ""},
    }
    daemon = Daemon(from_tree(tree))
    await daemon.open()
    walks: list[Walk] = []
    try:
        async with Client(endpoint) as client:
            await client.attach(rank=0)
            for number in range(tasks):
                task = WriteStorageTask(task_id=f"t{number}", keys=[f"k{number}"], gpu_block_ids=[number % 4])
                walks.append(Walk())
                sys.setprofile(walks[-1])
                result = await client.submit(task)
                sys.setprofile(None)
                assert result.status is Status.OK, result
    finally:
        sys.setprofile(None)
        await daemon.stop(lambda: 5.0)
    return min(walks, key=lambda walk: len(walk.calls))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", action="store_true", help="print every call, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="transferd-walk-") as directory:
        walk = asyncio.run(walk_write(Path(directory)))
    if options.calls:
        for file, function in walk.calls:
            print(f"{file:40} {function}")
    print(f"{len(walk.files)} files, {len(walk.calls)} calls, {walk.changes} changes of file")


if __name__ == "__main__":
    main()
