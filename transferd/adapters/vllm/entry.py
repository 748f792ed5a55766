"""What an engine process brings to a daemon: the engine's geometry, and the memory of its rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transferd.adapters.vllm.memory import Mapped
from transferd.client.client import Client
from transferd.client.engines import Engine
from transferd.client.pages import Pages
from transferd.tiers.base import DeviceHandle
from transferd.tiers.page_handles import shm_pages

CANARY_BLOCK = 0  # vLLM's null block, which holds no request's tokens


@dataclass(frozen=True, slots=True)
class OfferedMemory:
    """One rank's memory. segments: for each layer its offset in the mapped range, and the bytes from block to block.

    bytes: this process's own view of the mapped range, for a canary; None if every block may be in use.
    """

    rank: int
    mapped: Mapped
    segments: Sequence[tuple[int, int]]
    bytes: Any = None

    def handle(self) -> DeviceHandle:
        """Raises TierError."""
        mapped = self.mapped
        segments = [(mapped.offset + offset, stride) for offset, stride in self.segments]
        return shm_pages(mapped.name or mapped.descriptor(), segments, nbytes=mapped.offset + mapped.nbytes)


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """An engine as transferd sees it. page_bytes: of one block, for each layer. memory: what this process offers.

    The process that has rank 0 registers the engine.
    """

    name: str
    model: str
    generation: str
    identity: str
    ranks: int
    blocks: int
    page_bytes: Sequence[int]
    memory: OfferedMemory

    @property
    def block_bytes(self) -> int:
        return sum(self.page_bytes)

    async def enter(self, client: Client) -> None:
        """Register, offer memory, and wait until the engine is ready. Raises TransferError.

        If another process has not registered the engine yet, this raises, and the link tries again.
        """
        layout = Pages(
            layers=len(self.page_bytes), page_bytes=self.page_bytes, blocks=self.blocks, identity=self.identity
        )
        if self.memory.rank == 0:
            await client.register(Engine(ranks=self.ranks, model=self.model, generation=self.generation, layout=layout))
        caches = None if self.memory.bytes is None else layout.views(self.memory.bytes, self.memory.segments)
        await client.offer(self.memory.rank, self.memory.handle(), caches=caches, block=CANARY_BLOCK)
