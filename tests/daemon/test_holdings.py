"""Shares are given out once. Who may purge what: tests/integration/test_purge.py, with real users."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from transferd.config import from_tree
from transferd.daemon.holdings import Holdings
from transferd.errors import ConfigError, RequestError
from transferd.runtime.clock import SYSTEM_CLOCK
from transferd.storage.memory import MemoryStorage
from transferd.storage.object_store import ObjectStorage
from transferd.storage.queues import EngineOwner
from transferd.wire import protocol as wire


def holdings(share: float, backend: str = "memory") -> Holdings:
    config = from_tree({"engines": {"storage_share": share}, "storage": {"backend": backend}})
    return Holdings(config, MemoryStorage.from_config(config, clock=SYSTEM_CLOCK))


def engine(name: str, share: float) -> Any:
    return SimpleNamespace(owner=EngineOwner(name, 1), storage_share=share, objects=SimpleNamespace(space=f"{name}/f"))


def test_shares_add_up_to_the_whole_store_and_no_more() -> None:
    held = holdings(0.4)
    for name, asked, given in (("a", None, 0.4), ("b", 0.3, 0.3), ("c", None, 0.3), ("d", None, 0.0), ("e", 0.0, 0.0)):
        share = held.share_of(asked)
        assert share == pytest.approx(given), name
        held.came(engine(name, share))
    with pytest.raises(RequestError, match="0 are left") as refused:
        held.share_of(0.1)
    assert refused.value.reason == "share_exceeded"
    with pytest.raises(RequestError, match=r"one engine may have 0\.4"):
        held.share_of(0.5)


def test_a_daemon_without_storage_gives_no_share() -> None:
    config = from_tree({"storage": {"backend": "none"}})
    held = Holdings(config, None)
    assert held.share_of(None) == 0.0
    assert held.report() == []
    held.came(engine("a", 0.0))
    held.left(engine("a", 0.0))


async def test_a_bucket_does_not_know_its_objects_so_it_keeps_none_for_anybody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "unused")
    bucket = {"url": "s3://blocks/x", "endpoint": "http://127.0.0.1:9", "region": "us-east-1"}
    tree = {"storage": {"backend": "object", "object": bucket}}
    with pytest.raises(ConfigError, match="object cannot keep shares"):
        from_tree(tree | {"engines": {"storage_share": 0.4}})
    config = from_tree(tree)
    held = Holdings(config, ObjectStorage.from_config(config, clock=SYSTEM_CLOCK))
    held.came(engine("a", held.share_of(None)))
    assert held.report() == []
    for refused in (
        lambda: held.purge(Mock(), wire.Purge()),
        lambda: held.pin(Mock(), wire.Pin(["k"], 1.0)),
        lambda: held.unpin(Mock(), wire.Unpin(None)),
    ):
        with pytest.raises(RequestError, match="the object backend") as error:
            await refused()
        assert error.value.reason == "backend_cannot"


@pytest.mark.parametrize(
    ("uid", "backend", "code"),
    [
        (None, "memory", "not_yours"),
        (os.geteuid() + 1, "memory", "not_yours"),
        (os.geteuid(), "memory", "unknown_level"),
        (0, "memory", "unknown_level"),
        (0, "none", "no_storage_tier"),
    ],
)
async def test_only_the_daemons_user_and_root_change_levels(uid: int | None, backend: str, code: str) -> None:
    client: Any = SimpleNamespace(uid=uid)
    store = object.__new__(MemoryStorage) if backend == "memory" else None
    held = Holdings(from_tree({"storage": {"backend": backend}}), store)
    with pytest.raises(RequestError) as refused:
        await held.change_level(client, wire.ChangeLevel("memory", leaves=True))
    assert refused.value.reason == code
