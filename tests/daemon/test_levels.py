"""Who may take a level out; a store of one level has none."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from transferd.daemon.levels import change_level
from transferd.errors import RequestError
from transferd.storage.memory import MemoryStorage
from transferd.wire import protocol as wire


async def code(uid: int | None, storage: Any) -> str:
    client: Any = SimpleNamespace(uid=uid)
    with pytest.raises(RequestError) as refused:
        await change_level(storage, client, wire.ChangeLevel("memory", leaves=True))
    return refused.value.reason


async def test_only_the_daemons_user_and_root_may() -> None:
    storage = object.__new__(MemoryStorage)
    assert await code(None, storage) == "not_yours"
    assert await code(os.geteuid() + 1, storage) == "not_yours"
    assert await code(os.geteuid(), storage) == "unknown_level"
    assert await code(0, storage) == "unknown_level"
    assert await code(os.geteuid(), None) == "no_storage_tier"
