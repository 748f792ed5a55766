"""Routing replay: the rows of a block's tokens go where the block goes, and a block without them counts as not read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from transferd.adapters.fastdeploy import routing as module
from transferd.adapters.fastdeploy.arguments import RoutingShape
from transferd.adapters.fastdeploy.companion import Companion
from transferd.adapters.fastdeploy.items import StorageItem, SwapItem
from transferd.adapters.fastdeploy.objects import NodeDaemon
from transferd.adapters.fastdeploy.routing import Routing
from transferd.client.launch import running
from transferd.errors import TransferError
from transferd.tasks import Lane, Status, TaskResult

SHAPE = RoutingShape(tokens=4, layers=3, experts=2, dtype="uint16")
DEVICE, HOST, PORT = 8, 6, 4711


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In place of /dev/shm: the engine's memory with a number for each row."""
    monkeypatch.setattr(module, "SHARED_MEMORY", tmp_path)
    rows = np.arange(DEVICE * SHAPE.nbytes // 2, dtype=np.uint16)
    (tmp_path / f"routing_host_buffer.{PORT}").write_bytes(rows.tobytes())
    return tmp_path


@pytest.fixture
def routing(place: Path) -> Iterator[Routing]:
    made = Routing(SHAPE, PORT, DEVICE, HOST)
    yield made
    made.close()


def result(status: Status = Status.OK, blocks: tuple[int, ...] = (), generation: str = "g") -> TaskResult:
    return TaskResult(task_id="t", status=status, block_ids=list(blocks), generation=generation)


def swap(lane: Lane, gpu: list[int], cpu: list[int]) -> SwapItem:
    return SwapItem(lane, None, "t", [], gpu, cpu, event_first=True)


def storage(lane: Lane, keys: list[str], gpu: list[int], **source: Any) -> StorageItem:
    return StorageItem(lane, None, "t", keys, gpu, 30.0, SimpleNamespace(**source))


def test_rows_are_swapped_with_their_blocks(routing: Routing, place: Path) -> None:
    before = routing.device.copy()
    assert (routing.host == 65535).all(), "FastDeploy's value of nothing"
    routing.moved(swap(Lane.SWAP_OUT, [1, 5], [2, 0]), result())
    assert np.array_equal(routing.host[[2, 0]], before[[1, 5]])
    routing.moved(swap(Lane.SWAP_IN, [7, 3], [2, 0]), result())
    assert np.array_equal(routing.device[[7, 3]], before[[1, 5]])
    shared = np.frombuffer((place / f"routing_host_buffer.{PORT}").read_bytes(), dtype=np.uint16)
    assert np.array_equal(shared.reshape(routing.device.shape), routing.device), "in the engine's memory"


def test_a_swap_that_failed_moves_no_rows(routing: Routing) -> None:
    before = routing.host.copy()
    routing.moved(swap(Lane.SWAP_OUT, [1], [2]), result(Status.FAILED))
    assert np.array_equal(routing.host, before)


def test_without_the_engines_memory_the_start_fails_with_one_line(place: Path) -> None:
    with pytest.raises(
        TransferError, match=r"routing replay: the engine's memory routing_host_buffer\.1 cannot be used"
    ):
        Routing(SHAPE, 1, DEVICE, HOST)
    with pytest.raises(TransferError, match="cannot be used"):
        Routing(SHAPE, PORT, DEVICE + 1, HOST)


def test_rows_are_stored_and_loaded_and_a_block_without_them_is_not_read(
    routing: Routing, place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tree = {"storage": {"backend": "file"}, "host": {"staging": "64MiB"}, "engines": {"devices": ["shm"]}}
    with running(tree, place / "daemon") as daemon:
        routing.store_with(
            NodeDaemon(Companion(endpoint=daemon.endpoint, registers=True), starts=False),
            "model",
            {"weights": "w"},
            PORT,
        )
        before = routing.device.copy()
        wrote = result(blocks=(1, 2))
        assert routing.moved(storage(Lane.WRITE, ["a", "b", "c"], [1, 2, 3]), wrote) is wrote
        routing.device[[1, 2, 5, 6]] = 9
        read = routing.moved(storage(Lane.READ, ["a", "b"], [5, 6]), result(blocks=(5, 6)))
        assert read.block_ids == [5, 6]
        assert np.array_equal(routing.device[[5, 6]], before[[1, 2]])
        less = routing.moved(storage(Lane.READ, ["a", "c", "b"], [5, 6, 7]), result(blocks=(5, 6, 7)))
        assert less.block_ids == [5], "c was not moved by the write"
        assert "2 of 3 blocks have no stored routing, so they are not read" in caplog.text
        other = routing.moved(storage(Lane.READ, ["a"], [5]), result(blocks=(5,), generation="new weights"))
        assert other.block_ids == []
        routing.host[3] = 11
        routing.moved(storage(Lane.WRITE, ["h"], [], cpu_block_ids=[3]), result(blocks=(3,)))
        assert routing.moved(storage(Lane.READ, ["h"], [4]), result(blocks=(4,))).block_ids == [4]
        assert (routing.device[4] == 11).all(), "an evicted host block's"
