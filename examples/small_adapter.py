"""A small adapter: what an engine's cache manager asks, put into transferd's tasks. Its engine is synchronous.

    python examples/small_adapter.py [ENDPOINT]

The engine computes keys from tokens, so that equal prefixes have equal blocks. It saves the blocks of a prompt, and
loads the longest stored prefix of the next one. Without an endpoint this starts a daemon with [cache], as CACHE says.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from transferd import ReadStorageTask, Status, SyncClient, WriteStorageTask
from transferd.blocks.keys import block_keys
from transferd.client.launch import running

BLOCK_SIZE = 16
CACHE = {"ranks": 1, "layers": 2, "kv_heads": 2, "head_dim": 64, "block_size": BLOCK_SIZE, "device_blocks": 16}


class PrefixCache:
    """Saves and loads the KV of token prefixes. Which device blocks that takes, the engine decides."""

    def __init__(self, client: SyncClient) -> None:
        self._client = client
        self._numbers = itertools.count()

    def save(self, tokens: Sequence[int], blocks: list[int]) -> int:
        """Store the full blocks of a sequence, which lie in these device blocks. Returns how many are stored now."""
        keys = block_keys(tokens, BLOCK_SIZE, partial=False)
        if not keys:
            return 0
        task = WriteStorageTask(task_id=f"save-{next(self._numbers)}", keys=keys, gpu_block_ids=blocks[: len(keys)])
        # settled: when this returns, no rank reads these blocks any more, and the engine may use them for others.
        return len(self._client.submit(task, settled=True).block_ids)

    def load(self, tokens: Sequence[int], blocks: list[int]) -> int:
        """Fill device blocks with the longest stored prefix. Returns how many tokens need no prefill."""
        keys = block_keys(tokens, BLOCK_SIZE, partial=False)[: len(blocks)]
        if not keys:
            return 0
        task = ReadStorageTask(task_id=f"load-{next(self._numbers)}", keys=keys, gpu_block_ids=blocks[: len(keys)])
        result = self._client.submit(task, settled=True)
        # A cache never fails a request: whatever happened, what did not arrive is computed.
        return BLOCK_SIZE * len(result.block_ids) if result.status in (Status.OK, Status.PARTIAL) else 0


def main(endpoint: str) -> None:
    with SyncClient(endpoint) as client:
        caches, cache = client.attach(0), PrefixCache(client)
        prompt = list(range(40))  # two full blocks, and a rest that is not stored
        caches["key"][0][3], caches["key"][0][5] = 42, 43  # prefill
        stored = cache.save(prompt, [3, 5, 6])
        known = cache.load([*prompt[:32], 7, 7, 7], [10, 11, 12])
        print(stored, known, float(caches["key"][0][10].flat[0]), float(caches["key"][0][11].flat[0]))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        tree = {"cache": CACHE, "storage": {"backend": "memory"}}
        with tempfile.TemporaryDirectory() as directory, running(tree, Path(directory)) as daemon:
            main(daemon.endpoint)
