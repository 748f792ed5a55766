"""The device caches of all ranks as an engine has them attached: filled, wiped, compared byte by byte."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np

from transferd import Client, SyncClient

Caches = list[dict[str, list[np.ndarray[Any, Any]]]]


async def attach(client: Client, ranks: int = 2) -> Caches:
    return [await client.attach(rank=rank) for rank in range(ranks)]


@contextlib.asynccontextmanager
async def attached(endpoint: str) -> AsyncIterator[Client]:
    """A client that has every rank's memory attached, as an engine has; for tests that look at no bytes."""
    async with Client(endpoint) as client:
        await attach(client, len((await client.stats())["ranks"]))
        yield client


@contextlib.contextmanager
def attached_sync(endpoint: str) -> Iterator[SyncClient]:
    """The same, blocking."""
    with SyncClient(endpoint) as client:
        for rank in client.stats()["ranks"]:
            client.attach(rank["rank"])
        yield client


def arrays(caches: Caches) -> Iterator[np.ndarray[Any, Any]]:
    for cache in caches:
        for layers in cache.values():
            yield from layers


def fill(caches: Caches, blocks: list[int], seed: int) -> None:
    """Every byte of these blocks, on every rank, random."""
    random = np.random.default_rng(seed)
    for array in arrays(caches):
        for block in blocks:
            raw = array[block].view(np.uint8)
            raw[...] = random.integers(0, 256, raw.shape, dtype=np.uint8)


def snapshot(caches: Caches, blocks: list[int]) -> list[bytes]:
    return [array[block].tobytes() for array in arrays(caches) for block in blocks]


def wipe(caches: Caches, blocks: list[int]) -> None:
    for array in arrays(caches):
        array[blocks] = 0
