"""Whole slots in and out of a storage, object by object, as tests hold them."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence

from transferd.storage.base import Blob, Item, Outcome, Storage


def put(storage: Storage, blobs: Sequence[Blob]) -> Awaitable[list[Outcome]]:
    """Store each blob."""
    return storage.store(_items(blobs), None, [blob.data for blob in blobs])


def get(storage: Storage, blobs: Sequence[Blob]) -> Awaitable[list[Outcome]]:
    """Fill each blob."""
    return storage.load(_items(blobs), None, [blob.data for blob in blobs])


def _items(blobs: Sequence[Blob]) -> list[Item]:
    return [Item(blob.name, blob.data.nbytes, blob.use, blob.depth) for blob in blobs]
