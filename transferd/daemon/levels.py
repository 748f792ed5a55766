"""Who may take a level of storage out, and put it back: it changes what all engines find."""

from __future__ import annotations

import msgspec

from transferd.daemon.belonging import is_operator
from transferd.daemon.clients import KnownClient
from transferd.errors import RequestError
from transferd.storage.base import Storage
from transferd.wire import protocol as wire


async def change_level(storage: Storage | None, client: KnownClient, asked: wire.ChangeLevel) -> dict[str, str | int]:
    """Take a level out, or put it back, for the daemon's user and root. Raises RequestError."""
    if not is_operator(client.uid):
        raise RequestError("only the daemon's user and root may change the levels of storage", code="not_yours")
    if storage is None:
        raise RequestError('this daemon has no storage tier (storage.backend = "none")', code="no_storage_tier")
    change = await storage.change_level(asked.level, leaves=asked.leaves)
    return msgspec.structs.asdict(change)
