"""Whole slots in and out of a storage, object by object, as tests hold them; and objects that a test damages."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Sequence
from pathlib import Path

from transferd.errors import StorageError
from transferd.runtime.clock import SYSTEM_CLOCK
from transferd.storage.base import Blob, Found, Item, Outcome, Storage
from transferd.storage.levels.base import Proof


def put(storage: Storage, blobs: Sequence[Blob]) -> Awaitable[list[Outcome]]:
    """Store each blob."""
    return storage.store(_items(blobs), None, [blob.data for blob in blobs])


async def promise(storage: Storage, blobs: Sequence[Blob]) -> list[Proof | StorageError]:
    """Store each blob, and have the levels that its use must reach say that they have it. The blobs have one use."""
    since = SYSTEM_CLOCK.monotonic()
    outcomes = await put(storage, blobs)
    assert all(outcome.found in (Found.STORED, Found.EXISTS) for outcome in outcomes), outcomes
    return await prove(storage, blobs, since)


async def prove(storage: Storage, blobs: Sequence[Blob], since: float | None = None) -> list[Proof | StorageError]:
    """The second half of `promise`. since: when the task began, if not now."""
    levels, use = storage.levels, blobs[0].use
    assert levels is not None
    assert use is not None
    began = SYSTEM_CLOCK.monotonic() if since is None else since
    return await levels.prove([(blob.name, blob.data.nbytes, blob.depth) for blob in blobs], use, began)


def get(storage: Storage, blobs: Sequence[Blob]) -> Awaitable[list[Outcome]]:
    """Fill each blob."""
    return storage.load(_items(blobs), None, [blob.data for blob in blobs])


def _items(blobs: Sequence[Blob]) -> list[Item]:
    return [Item(blob.name, blob.data.nbytes, blob.use, blob.depth) for blob in blobs]


def overwrite(path: Path, data: bytes | bytearray) -> None:
    """Change a file's content in place, so that nobody who looks meanwhile sees it shorter."""
    with path.open("r+b") as file:
        assert len(data) == os.fstat(file.fileno()).st_size, path
        file.write(data)
