"""Whole slots in and out of a storage, object by object, as tests hold them; and objects that a test damages."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Sequence
from pathlib import Path

from transferd.storage.base import Blob, Item, Outcome, Storage


def put(storage: Storage, blobs: Sequence[Blob]) -> Awaitable[list[Outcome]]:
    """Store each blob."""
    return storage.store(_items(blobs), None, [blob.data for blob in blobs])


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
