"""The open token index: token-indexed storage that needs only a keyed backend.

A path's blocks are named by their chained block keys (`keys.block_keys`), which anyone can compute from
the tokens alone. The bytes are stored under these keys in `storage.attention_store.data`, any keyed backend,
sealed like all other objects. So nodes that share a Mooncake pool share what they write. The TokenIndex
knows which node has which blocks.
"""

from __future__ import annotations

from typing import Any

from transferd.blocks.paths import PathKeys
from transferd.config import StorageSection
from transferd.errors import StorageUnavailable
from transferd.runtime.aio import every
from transferd.storage.attention_store.index import TokenIndex
from transferd.storage.base import Storage
from transferd.storage.tokens import RankPort, TokenStorage, Transfer
from transferd.tasks import RankOutcome, TokenIds
from transferd.wire.kv_events import MEDIUM_CPU, MEDIUM_GPU, BlockRemoved, BlockStored, block_hash


class OpenTokenStorage(TokenStorage):
    """See the module.

    node: this node's name in the index. block_size: tokens of a block.
    keyed: None keeps only the index; nothing is stored and every read misses.
    """

    backend = "attention_store"
    salts = True

    def __init__(self, node: str, block_size: int, keyed: Storage | None) -> None:
        self.keyed = keyed
        self.node = node
        self.index = TokenIndex()
        self.paths = PathKeys(block_size)
        self._ports: dict[int, RankPort] = {}

    # --- the contract -------------------------------------------------------------------------------

    async def open(self) -> None:
        if self.keyed is not None:
            await self.keyed.open()

    async def attach(self, port: RankPort) -> None:
        self._ports[port.rank] = port

    def detach(self, rank: int) -> None:
        self._ports.pop(rank, None)

    def reconfigure(self, storage: StorageSection) -> None:
        if self.keyed is not None:
            self.keyed.reconfigure(storage)

    async def match(self, path: TokenIds, start: int, generation: str, salt: str = "") -> int:
        if self.keyed is None:
            return 0
        keys = self.paths.keys(path, start, salt=salt)
        return min(await every(port.match(generation, keys) for port in self._ports.values()))

    async def read(self, transfer: Transfer) -> RankOutcome:
        if self.keyed is None:
            return transfer.ended(0, None, 0.0)
        return await transfer.by_keys(self._keys(transfer))

    async def write(self, transfer: Transfer) -> RankOutcome:
        if self.keyed is None:
            nowhere = StorageUnavailable(
                'cannot store blocks: storage.attention_store.data is "none", which keeps only the index'
            )
            return transfer.ended(0, nowhere, 0.0)
        return await transfer.by_keys(self._keys(transfer))

    def _keys(self, transfer: Transfer) -> list[str]:
        return self.paths.keys(transfer.path, transfer.start, len(transfer.blocks), transfer.salt)

    async def flush_token_index(self, path: TokenIds, start: int, *, resident: bool, salt: str = "") -> None:
        hashes = [block_hash(key) for key in self.paths.keys(path, start, salt=salt)]
        if resident:
            self.index.apply(self.node, BlockStored(hashes, None, [], 0, None, MEDIUM_GPU, None))
        else:
            for medium in (MEDIUM_GPU, MEDIUM_CPU):
                self.index.apply(self.node, BlockRemoved(hashes, medium))

    async def close(self) -> None:
        if self.keyed is not None:
            await self.keyed.close()

    def statistics(self) -> dict[str, Any]:
        keyed = {"objects": 0, "bytes": 0, "hits": 0, "misses": 0, "errors": 0}
        if self.keyed is not None:
            keyed = self.keyed.statistics() | {"data": self.keyed.backend}
        return keyed | {"node": self.node, "index": self.index.statistics()}
