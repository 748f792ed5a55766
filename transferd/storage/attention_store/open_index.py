"""The open token index: token-indexed storage that needs only a keyed backend.

A path's blocks are named by their chained block keys (`keys.block_keys`), and stored under these keys in
`storage.attention_store.data`, sealed like all other objects. So nodes that share a pool share their objects. The
TokenIndex has the blocks of each node.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transferd.blocks.keys import path_keys
from transferd.errors import StorageUnavailable
from transferd.runtime.aio import every
from transferd.storage.base import Storage
from transferd.storage.tokens import RankPort, TokenStorage, Transfer
from transferd.tasks import RankOutcome, TokenIds
from transferd.wire.kv_events import (
    MEDIUM_CPU,
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEvent,
    block_hash,
)


class OpenTokenStorage(TokenStorage):
    """See the module.

    node: this node's name in the index.
    block_size: tokens of a block.
    keyed: holds the bytes. None keeps only the index; nothing is stored and every read misses.
    """

    backend = "attention_store"
    salts = True

    def __init__(self, node: str, block_size: int, keyed: Storage | None) -> None:
        self._keyed = keyed
        self.node = node
        self.index = TokenIndex()
        self.block_size = block_size
        self._ports: dict[int, RankPort] = {}

    async def attach(self, port: RankPort) -> None:
        self._ports[port.rank] = port

    def detach(self, rank: int) -> None:
        self._ports.pop(rank, None)

    async def match(self, path: TokenIds, start: int, generation: str, salt: str = "") -> int:
        if self._keyed is None:
            return 0
        keys = path_keys(path, self.block_size, salt)[start:]
        return min(await every(port.match(generation, keys) for port in self._ports.values()))

    async def read(self, transfer: Transfer) -> RankOutcome:
        return await self._moved(transfer, None)

    async def write(self, transfer: Transfer) -> RankOutcome:
        what = 'cannot store blocks: storage.attention_store.data is "none", which keeps only the index'
        return await self._moved(transfer, StorageUnavailable(what))

    async def _moved(self, transfer: Transfer, nowhere: StorageUnavailable | None) -> RankOutcome:
        """nowhere: the error if there is no storage behind the index."""
        if self._keyed is None:
            return transfer.ended(0, nowhere, 0.0)
        keys = path_keys(transfer.path, self.block_size, transfer.salt)
        return await transfer.by_keys(keys[transfer.start : transfer.start + len(transfer.blocks)])

    async def flush_token_index(self, path: TokenIds, start: int, *, resident: bool, salt: str = "") -> None:
        hashes = [block_hash(key) for key in path_keys(path, self.block_size, salt)[start:]]
        if resident:
            self.index.apply(self.node, BlockStored(hashes, None, [], 0, None, MEDIUM_GPU, None))
        else:
            for medium in (MEDIUM_GPU, MEDIUM_CPU):
                self.index.apply(self.node, BlockRemoved(hashes, medium))

    def statistics(self) -> dict[str, Any]:
        keyed = {"objects": 0, "bytes": 0, "hits": 0, "misses": 0, "errors": 0}
        if self._keyed is not None:
            keyed = self._keyed.statistics() | {"data": self._keyed.backend}
        return keyed | {"node": self.node, "index": self.index.statistics()}


ANY_MEDIUM = "any"


class TokenIndex:
    """Announced blocks, by node, engine and medium, as KV events (wire/kv_events.py) report them.

    Changed on the loop only.

    A block is identified by its hash. Any node can compute the hashes of a path, from the block keys of its tokens.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[str, int, str], set[int]] = {}  # by node, engine and medium

    def apply(self, node: str, event: KvEvent, engine: int = 0) -> None:
        """Apply an event that a node published about one of its engines. Removing what is not there does nothing.

        engine: its dp_rank; AllBlocksCleared is about this engine alone.
        """
        if isinstance(event, BlockStored):
            self._held.setdefault((node, engine, event.medium), set()).update(event.block_hashes)
        elif isinstance(event, BlockRemoved):
            self._held.get((node, engine, event.medium), set()).difference_update(event.block_hashes)
        elif isinstance(event, AllBlocksCleared):
            self._held = {place: held for place, held in self._held.items() if place[:2] != (node, engine)}

    def forget(self, node: str) -> None:
        """Drop all blocks of this node."""
        self._held = {place: held for place, held in self._held.items() if place[0] != node}

    def blocks_of(self, node: str) -> int:
        """How many blocks a node has announced, summed over all engines and media."""
        return sum(len(held) for place, held in self._held.items() if place[0] == node)

    def locate(self, hashes: Sequence[int]) -> dict[str, dict[str, int]]:
        """For each node that has the first block: leading blocks per medium, and over all media under `any`.

        A path counts as far as one engine of the node has it.
        """
        engines: dict[tuple[str, int], dict[str, set[int]]] = {}
        for (node, engine, medium), held in self._held.items():
            engines.setdefault((node, engine), {})[medium] = held
        found: dict[str, dict[str, int]] = {}
        for (node, _), media in engines.items():
            counts = {medium: _leading(hashes, [held]) for medium, held in media.items()}
            counts[ANY_MEDIUM] = _leading(hashes, list(media.values()))
            if counts[ANY_MEDIUM]:
                there = found.setdefault(node, {})
                there |= {medium: max(count, there.get(medium, 0)) for medium, count in counts.items() if count}
        return found

    def statistics(self) -> dict[str, dict[str, int]]:
        """The number of blocks, by node and medium."""
        counts: dict[str, dict[str, int]] = {}
        for (node, _, medium), held in self._held.items():
            media = counts.setdefault(node, {})
            media[medium] = media.get(medium, 0) + len(held)
        return counts


def _leading(hashes: Sequence[int], held: Sequence[set[int]]) -> int:
    return next((i for i, hash_ in enumerate(hashes) if not any(hash_ in some for some in held)), len(hashes))
