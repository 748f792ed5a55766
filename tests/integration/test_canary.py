"""A handle that leads elsewhere is refused before the daemon serves, and the engine's bytes are what they were."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration.own_memory import from_me
from transferd import Client, Status, WriteStorageTask
from transferd.adapters.shared_caches import SharedCaches
from transferd.client.offers import laid
from transferd.config import from_tree
from transferd.daemon.daemon import Daemon
from transferd.errors import RequestError, TransferError
from transferd.tiers.base import DeviceHandle
from transferd.workers.rank import RankWorker

CACHE: dict[str, Any] = {
    "ranks": 2, "layers": 2, "kv_heads": 2, "head_dim": 4, "block_size": 4, "device_blocks": 8, "host_blocks": 0,
    "mtp_layers": 1, "mtp_blocks": 9, "dtype": "block_wise_fp8",
}  # fmt: skip
Handle = dict[str, Any]


def made_daemon(place: Path, device: str = "shm") -> Daemon:
    tree = {
        "server": {"endpoint": f"ipc://{place}/t.sock"},
        "cache": CACHE | {"device": device, "ownership": "attach"},
        "host": {"staging": "64KiB"},
        "storage": {"backend": "memory"},
        "metrics": {"listen": ""},
    }
    return Daemon(from_tree(tree))


@pytest.fixture(params=["shm", "paddle"])
async def daemon(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Daemon]:
    if request.param == "paddle":
        pytest.importorskip("paddle", reason="the paddle extra is not installed")
    made = made_daemon(tmp_path, request.param)
    await made.open()
    yield made
    await made.stop(lambda: 5.0)


@pytest.fixture
async def client(daemon: Daemon) -> AsyncIterator[Client]:
    async with Client(daemon.transport.endpoints[0], await_ready=False) as connected:
        yield connected


def filled(seed: int) -> SharedCaches:
    made = SharedCaches(CACHE)
    chance = np.random.default_rng(seed)
    for arrays in made.caches.values():
        for array in arrays:
            array.view(np.uint8)[...] = chance.integers(0, 256, array.view(np.uint8).shape, dtype=np.uint8)
    return made


def content(engine: SharedCaches) -> list[bytes]:
    return [array.tobytes() for arrays in engine.caches.values() for array in arrays]


async def test_a_handle_that_leads_to_the_engines_bytes_is_taken_and_no_byte_has_changed(
    daemon: Daemon, client: Client
) -> None:
    with filled(0) as zero, filled(1) as one:
        before = content(zero), content(one)
        await client.offer(0, zero.handle, caches=zero.caches)
        assert daemon.default.cache.missing == [1]
        await client.offer(1, one.handle, caches=one.caches, block=7)
        await client.wait_ready(60)
        assert (content(zero), content(one)) == before
        await client.offer(0, zero.handle, caches=zero.caches)  # again: nothing is written into blocks in use
        result = await client.submit(WriteStorageTask(task_id="w", keys=["k"], gpu_block_ids=[1]))
        assert result.status is Status.OK


def place(handle: Handle, plane: str, layer: int) -> Handle:
    found: Handle = next(item for item in handle["arrays"] if (item["plane"], item["layer"]) == (plane, layer))
    return found


def swap_offsets(handle: Handle, one: tuple[str, int], other: tuple[str, int]) -> None:
    first, second = place(handle, *one), place(handle, *other)
    first["offset"], second["offset"] = second["offset"], first["offset"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda handle: swap_offsets(handle, ("key", 0), ("value", 0)), r"block 1 of key of layer 0 .*\(2 of 12"),
        (lambda handle: swap_offsets(handle, ("key", 0), ("key", 1)), r"block 1 of key of layer 0 .*\(2 of 12"),
        (lambda handle: swap_offsets(handle, ("key_scale", 1), ("value_scale", 1)), r"key_scale of layer 1"),
        (lambda handle: place(handle, "value", 1).update(offset=place(handle, "value", 1)["offset"] + 32),
         "value of layer 1|overlap"),
    ],
    ids=["planes swapped", "layers swapped", "scales swapped", "one block off"],
)  # fmt: skip
async def test_a_handle_that_leads_elsewhere_is_refused_and_nothing_is_kept(
    daemon: Daemon, client: Client, change: Callable[[Handle], None], said: str
) -> None:
    with filled(0) as zero, filled(1) as one:
        before = content(zero)
        data = {**zero.handle.data, "arrays": [dict(item) for item in zero.handle.data["arrays"]]}
        change(data)
        with pytest.raises(RequestError, match=said) as caught:
            await client.offer(0, DeviceHandle("shm", data), caches=zero.caches)
        assert caught.value.reason in ("canary_mismatch", "layout_mismatch")
        assert daemon.default.cache.missing == [0, 1]
        assert not daemon.default.coordinator.workers[0].context.device.statistics()["open"]
        assert content(zero) == before
        with pytest.raises(RequestError, match=r"12 of 12 arrays differ.*that it belongs to this rank") as caught:
            await client.offer(1, zero.handle, caches=one.caches)  # the other rank's handle
        assert caught.value.reason == "canary_mismatch"
        await client.offer(0, zero.handle, caches=zero.caches)
        await client.offer(1, one.handle, caches=one.caches)
        await client.wait_ready(60)
        staging = (await client.stats())["staging"]
        assert staging["used"] == 0


async def test_an_offer_counts_only_once_the_engine_has_its_bytes_back(daemon: Daemon, client: Client) -> None:
    """Between the look and the offer nobody may be told that the memory is there."""
    with filled(0) as zero:
        with laid(zero.caches) as canary:
            handle = DeviceHandle("shm", zero.handle.data | {"canary": canary})
            assert (
                await daemon.default.cache.offer(b"engine", 0, from_me(handle), daemon.default.cache.epoch) == "checked"
            )
            assert daemon.default.cache.missing == [0, 1]
            assert not daemon.default.coordinator.workers[0].context.device.statistics()["open"]
        await client.offer(0, zero.handle)
        assert daemon.default.cache.missing == [1]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"block": 8}, "id_out_of_range"),
        ({"block": -1}, "id_out_of_range"),
        ({"block": "1"}, "bad_value"),
        ({"sums": {}}, "bad_value"),
        ({"sums": {"key": ["0" * 16] * 3}}, "bad_value"),
        ({"sums": {"key": ["no digest"]}}, "bad_value"),
        ({"sums": 7}, "bad_value"),
    ],
)
@pytest.mark.parametrize("daemon", ["shm"], indirect=True)
async def test_a_malformed_canary_is_refused_with_a_code(
    daemon: Daemon, client: Client, change: dict[str, Any], reason: str
) -> None:
    with filled(0) as zero, laid(zero.caches) as canary:
        handle = DeviceHandle("shm", zero.handle.data | {"canary": canary | change})
        with pytest.raises(TransferError) as caught:
            await client.offer(0, handle)
        assert caught.value.reason == reason
        assert daemon.default.cache.missing == [0, 1]


def test_bytes_come_back_also_when_the_offer_fails_and_bad_blocks_are_refused() -> None:
    with filled(0) as zero:
        before = content(zero)

        def refused() -> None:
            with laid(zero.caches):
                assert content(zero) != before
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            refused()
        assert content(zero) == before
        for block in (-1, 8):
            with pytest.raises(RequestError, match="the caches have 8 blocks"), laid(zero.caches, block):
                pass
        with pytest.raises(RequestError, match=r"not list$"), laid({"key": [[1, 2]]}):
            pass


@pytest.mark.parametrize("stopped", [False, True], ids=["it gets it", "it is stopped first"])
async def test_an_offer_to_a_daemon_that_has_no_host_memory_yet_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: bool
) -> None:
    """The block of a canary is read into staging. A daemon that wrote it to address 0 would not live to tell."""
    go, allocate = threading.Event(), RankWorker._allocate

    def late(worker: RankWorker) -> None:
        assert go.wait(60)
        allocate(worker)

    monkeypatch.setattr(RankWorker, "_allocate", late)
    daemon = made_daemon(tmp_path)
    opening = asyncio.ensure_future(daemon.open())
    with filled(0) as zero, filled(1) as one:
        before = content(zero), content(one)
        async with Client(f"ipc://{tmp_path}/t.sock", await_ready=False, connect_timeout=60) as client:
            engines = enumerate((zero, one))
            offers = [asyncio.ensure_future(client.offer(rank, e.handle, caches=e.caches)) for rank, e in engines]
            cache = daemon.default.cache
            # Until the daemon has both offers, and an answer to one that did not wait would have come before ours.
            while not (len(cache._offering) == 2 or any(offer.done() for offer in offers)):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert (await client.stats())["ready"] is False
            assert not any(offer.done() for offer in offers)
            if stopped:
                stopping = asyncio.ensure_future(daemon.stop(lambda: 20.0))
                await asyncio.sleep(0)
            go.set()
            if stopped:
                await stopping
                failed = await asyncio.gather(*offers, return_exceptions=True)
                assert all(isinstance(error, TransferError) for error in failed), failed
                opening.cancel()
                await asyncio.gather(opening, return_exceptions=True)
            else:
                await asyncio.gather(opening, *offers)
                await client.wait_ready(60)
        assert (content(zero), content(one)) == before
    if not stopped:
        await daemon.stop(lambda: 5.0)
