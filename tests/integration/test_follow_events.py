"""examples/follow_events.py over two lives of a daemon, over gaps and clears: it holds what the daemon announces."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from transferd import Client, Status, WriteStorageTask
from transferd.client.launch import running
from transferd.wire.kv_events import block_hash

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
WITHIN_S = 60.0
CACHE = {"ranks": 1, "layers": 1, "kv_heads": 1, "head_dim": 16, "block_size": 16, "device_blocks": 16}


@pytest.fixture
def follow_events(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.delitem(sys.modules, "follow_events", raising=False)
    import follow_events  # type: ignore[import-not-found]

    return follow_events


def tree(directory: Path, **events: Any) -> dict[str, Any]:
    sockets = {"endpoint": f"ipc://{directory}/events", "replay_endpoint": f"ipc://{directory}/replay"}
    return {"events": sockets | events, "cache": CACHE, "storage": {"backend": "memory"}}


@contextlib.contextmanager
def following(follow_events: Any, directory: Path) -> Iterator[Any]:
    follower = follow_events.Follower(f"ipc://{directory}/events", f"ipc://{directory}/replay")
    try:
        yield follower
    finally:
        follower.close()


def until(follower: Any, true: Callable[[], object]) -> None:
    give_up = time.monotonic() + WITHIN_S
    while not true():
        assert time.monotonic() < give_up, dict(follower.index)
        for _ in follower.step():
            pass


def write(endpoint: str, keys: list[str]) -> set[int]:
    """Store these keys, a batch of events each. Returns their hashes."""

    async def store() -> None:
        async with Client(endpoint) as client:
            await client.attach(0)
            for key in keys:
                task = WriteStorageTask(task_id=f"w-{key}", keys=[key], gpu_block_ids=[3])
                assert (await client.submit(task)).status is Status.OK

    asyncio.run(store())
    return {block_hash(key) for key in keys}


def stored(follower: Any) -> set[int]:
    return set().union(*(media["STORAGE"] for media in follower.index.values()))


def test_it_follows_a_daemon_into_its_next_life(follow_events: Any, tmp_path: Path) -> None:
    with following(follow_events, tmp_path) as follower:
        with running(tree(tmp_path), tmp_path) as daemon:
            old = write(daemon.endpoint, [f"old-{i}" for i in range(15)])
            until(follower, lambda: stored(follower) == old)
            daemon.kill()
        with running(tree(tmp_path), tmp_path) as daemon:
            new = write(daemon.endpoint, [f"new-{i}" for i in range(10)])
            until(follower, lambda: stored(follower) == new)
            more = write(daemon.endpoint, [f"more-{i}" for i in range(40)])
            until(follower, lambda: stored(follower) == new | more)


def test_after_a_gap_that_is_not_kept_it_takes_a_snapshot(follow_events: Any, tmp_path: Path) -> None:
    with running(tree(tmp_path, buffer=5), tmp_path) as daemon, following(follow_events, tmp_path) as follower:
        known = write(daemon.endpoint, ["a"])
        until(follower, lambda: stored(follower) == known)
        follower._live.unsubscribe(b"")
        known |= write(daemon.endpoint, [f"missed-{i}" for i in range(50)])
        follower._live.subscribe(b"")
        known |= write(daemon.endpoint, ["z"])
        until(follower, lambda: stored(follower) == known)


def test_a_silence_is_looked_behind_and_a_late_comer_gets_all(follow_events: Any, tmp_path: Path) -> None:
    with running(tree(tmp_path), tmp_path) as daemon:
        known = write(daemon.endpoint, [f"early-{i}" for i in range(8)])
        with following(follow_events, tmp_path) as follower:
            until(follower, lambda: stored(follower) == known)
            follower._live.unsubscribe(b"")  # as if the last batches were lost
            known |= write(daemon.endpoint, ["last"])
            until(follower, lambda: stored(follower) == known)


def test_a_clear_is_of_one_engine(follow_events: Any, tmp_path: Path) -> None:
    def batch(engine: int, *events: dict[str, Any]) -> bytes:
        return msgspec.msgpack.encode([0.0, events, engine])

    def of(engine: int) -> dict[str, Any]:
        return {"type": "BlockStored", "medium": "GPU", "block_hashes": [engine]}

    with following(follow_events, tmp_path) as follower:
        for payload in (batch(0, of(0)), batch(1, of(1)), batch(0, {"type": "AllBlocksCleared"})):
            list(follower._apply(payload))
        assert (follower.holds("GPU", 0), follower.holds("GPU", 1)) == (False, True)
