"""What an engine process registers and offers to a daemon: the engine's geometry, and the memory of its rank."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from transferd.adapters.common.memory import Mapped
from transferd.blocks.fingerprint import Facts
from transferd.client.client import Client
from transferd.client.engines import Engine
from transferd.client.pages import Pages
from transferd.tiers.base import DeviceHandle
from transferd.tiers.page_handles import shm_pages

CANARY_BLOCK = 0  # of an engine with a null block, as vLLM has: it holds no request's tokens

Point = tuple[int, int]  # a timeline and a number (client/timeline.py)


class Order(enum.IntEnum):
    """What it means that a rank has passed a step. For several ranks, the lowest value counts."""

    NONE = 0  # the rank cannot order copies behind its steps at the moment
    STREAM = 1  # the rank's stream will write the step's number to its timeline; copies wait for that
    HOST = 2  # the step has been computed


class Memory(Protocol):
    """One rank's KV memory.

    rank: the rank's number.
    cache: keys of [cache] that the daemon needs besides the pages.
    order: what `advance` achieves.
    """

    @property
    def rank(self) -> int: ...
    @property
    def cache(self) -> Mapping[str, Any]: ...
    @property
    def order(self) -> Order: ...
    def handle(self) -> DeviceHandle:
        """Raises TierError."""
        ...

    def caches(self, layout: Pages) -> Mapping[str, Sequence[Any]] | None:
        """This process's own view of the memory, for a canary; None if every block may be in use."""
        ...

    async def entered(self, client: Client) -> None:
        """Called once the daemon has mapped the memory. Raises TransferError."""
        ...

    def advance(self, after: Point) -> None:
        """Called once all work of a step was submitted to the device. Orders copies that wait for `after` behind it."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class OfferedMemory:
    """Memory on the host. segments: for each layer its offset in the mapped range, and the bytes from block to block.

    more: ranges of other files; a segment's third number says in which one it lies, 0 being `mapped`.
    bytes: this process's own view of the mapped range, for a canary; None if every block may be in use.
    """

    rank: int
    mapped: Mapped
    segments: Sequence[tuple[int, ...]]
    bytes: Any = None
    more: Sequence[Mapped] = ()

    @property
    def cache(self) -> Mapping[str, Any]:
        return {}

    @property
    def order(self) -> Order:
        return Order.HOST  # on a CPU, a submitted step has been computed

    def handle(self) -> DeviceHandle:
        """Raises TierError."""
        ranges = [self.mapped, *self.more]
        segments = [
            (ranges[which[0] if which else 0].offset + offset, stride, *which)
            for offset, stride, *which in self.segments
        ]
        memories = [one.name or one.descriptor() for one in ranges]
        return shm_pages(memories, segments, nbytes=[one.offset + one.nbytes for one in ranges])

    def caches(self, layout: Pages) -> Mapping[str, Sequence[Any]] | None:
        return None if self.bytes is None else layout.views(self.bytes, self.segments)

    async def entered(self, client: Client) -> None:
        """Host memory needs nothing more."""

    def advance(self, after: Point) -> None:
        """Host memory is computed already, so no copy has to wait."""

    def close(self) -> None:
        """The engine owns the memory."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """An engine as transferd sees it.

    The process that has rank 0 registers the engine.
    """

    name: str
    model: str
    generation: str
    identity: str
    ranks: int
    blocks: int
    page_bytes: Sequence[int]  # each segment's bytes per block
    memory: Memory  # what this process offers
    # shared by all processes of the engine, and by no other engine; "" if there is only this process
    token: str = field(default="", repr=False)
    fingerprint: Facts = field(default_factory=dict)  # what engines that share blocks have in common (identity.py)
    windows: bool = False  # blocks may share bytes (`Pages`)
    first_rank: int = 0  # of a group of group_ranks, of which other engines are the rest; 0: all ranks are ours
    group_ranks: int = 0

    @property
    def block_bytes(self) -> int:
        return sum(self.page_bytes)

    async def enter(self, client: Client, *, canary: bool = True) -> None:
        """Register, offer memory, and wait until the engine is ready. Raises TransferError.

        canary: have the daemon check that it has mapped the right bytes, with a canary in the null block.
        If another process has not registered the engine yet, this raises, and the link tries again.
        """
        memory = self.memory
        layout = Pages(
            layers=len(self.page_bytes),
            page_bytes=self.page_bytes,
            blocks=self.blocks,
            identity=self.identity,
            windows=self.windows,
        )
        if memory.rank == 0:
            cache = {**layout.as_cache(), **memory.cache}
            await client.register(
                Engine(
                    ranks=self.ranks,
                    first_rank=self.first_rank,
                    group_ranks=self.group_ranks,
                    model=self.model,
                    generation=self.generation,
                    layout=cache,
                    fingerprint=self.fingerprint,
                )
            )
        caches = memory.caches(layout) if canary else None
        await client.offer(memory.rank, memory.handle(), caches=caches, block=CANARY_BLOCK)
        await memory.entered(client)
