"""FastDeploy's tuples: understood in every shape that was in use, answered in the shape of the question."""

from __future__ import annotations

import enum
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from transferd.adapters.fastdeploy.items import ControlItem, Item
from transferd.adapters.fastdeploy.items import read_item as read_any_item
from transferd.errors import RequestError
from transferd.tasks import ReadStorageTask, Status, SwapInTask, SwapOutTask, TaskResult, TokenIds, WriteStorageTask


class CacheStatus(enum.Enum):
    """As FastDeploy has it; the numbers of the storage events are made up."""

    GPU = 0
    SWAP2CPU = 1
    SWAP2GPU = 2
    CPU = 3
    STORAGE2GPU = 17
    GPU2STORAGE = 18


class Numbers(enum.Enum):
    """The same values under other names, as after a rename."""

    OUT = 1
    IN = 2
    STORE = 3


def read_item(put: Any) -> Item:
    item = read_any_item(put)
    assert not isinstance(item, ControlItem)
    return item


def result(status: Status, block_ids: list[int]) -> TaskResult:
    return TaskResult(task_id="t", status=status, block_ids=block_ids)


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        (CacheStatus.SWAP2CPU, SwapOutTask),
        (CacheStatus.SWAP2GPU, SwapInTask),
        (Numbers.OUT, SwapOutTask),
        (Numbers.IN, SwapInTask),
        (SimpleNamespace(value=2), SwapInTask),
        (1, SwapOutTask),
    ],
)
@pytest.mark.parametrize("older", [False, True])
def test_a_swap_is_known_by_name_or_number_in_both_orders(event: Any, kind: type, older: bool) -> None:
    put = ([7, 8], [1, 2], [3, 4], event, "r1") if older else (event, "r1", [7, 8], [1, 2], [3, 4])
    item = read_item(put)
    assert item.task("id", 9.0) == kind(task_id="id", timeout=9.0, gpu_block_ids=[1, 2], cpu_block_ids=[3, 4])
    assert item.answers(result(Status.OK, [1, 2]), ranks=4) == [put]
    assert item.answers(result(Status.OK, [1, 2]), ranks=4)[0][3 if older else 0] is event


@pytest.mark.parametrize("status", [status for status in Status if status is not Status.OK])
def test_a_swap_that_is_not_whole_is_answered_with_nothing(status: Status) -> None:
    new = read_item((CacheStatus.SWAP2GPU, "r1", [7], [1], [3]))
    old = read_item(([7], [1], [3], CacheStatus.SWAP2GPU, "r1"))
    assert new.answers(result(status, []), 2) == [(CacheStatus.SWAP2GPU, "r1", [], [], [])]
    assert old.answers(result(status, []), 2) == [([], [], [], CacheStatus.SWAP2GPU, "r1")]


def test_a_read_carries_every_attribute_and_is_answered_once_for_each_rank() -> None:
    source = SimpleNamespace(
        task_id="r1", keys=["a", "b"], token_ids=[1, 2, 3], gpu_block_ids=[5, 6, 7], start_read_block_idx=4, timeout=2.5
    )
    item = read_item((CacheStatus.STORAGE2GPU, source))
    assert item.task("id", 9.0) == ReadStorageTask(
        task_id="id",
        timeout=2.5,
        keys=["a", "b"],
        gpu_block_ids=[5, 6, 7],
        token_ids=TokenIds([1, 2, 3]),
        start_read_block_idx=4,
    )
    answers = item.answers(result(Status.PARTIAL, [5]), ranks=3)
    assert answers == [(CacheStatus.STORAGE2GPU, "r1", ["a", "b"], [5])] * 3
    answers[0][3].append(6)  # FastDeploy keeps the lists
    assert answers[1][3] == [5]


def test_a_write_of_any_version_is_understood_and_answered_once_for_each_rank() -> None:
    plain = SimpleNamespace(task_id="r1", keys=["a"], token_ids=None, gpu_block_ids=[5], timeout=30.0)
    task = read_item((CacheStatus.GPU2STORAGE, plain)).task("id", 9.0)
    assert task == WriteStorageTask(task_id="id", keys=["a"], gpu_block_ids=[5])
    later = SimpleNamespace(**vars(plain), start_write_block_idx=3, flush_cache_exists=False)
    item = read_item((CacheStatus.GPU2STORAGE, later))
    task = item.task("id", 9.0)
    assert isinstance(task, WriteStorageTask)
    assert (task.start_write_block_idx, task.flush_cache_exists, task.chains) == (3, False, msgspec.UNSET)
    ours = read_item((CacheStatus.GPU2STORAGE, SimpleNamespace(**vars(plain), chains=[(0, 3, "before")])))
    assert ours.task("id", 9.0).chains == [(0, 3, "before")]  # type: ignore[union-attr]
    gone = SimpleNamespace(**vars(plain) | {"gpu_block_ids": []}, flush_cache_exists=None)
    task = read_item((CacheStatus.GPU2STORAGE, gone)).task("id", 9.0)
    assert isinstance(task, WriteStorageTask)
    assert task.flush_cache_exists is False, "without device blocks nothing is on the device"
    assert item.answers(result(Status.OK, [5]), ranks=4) == [(CacheStatus.GPU2STORAGE, "r1", ["a"], [5])] * 4


@pytest.mark.parametrize(
    ("event", "kind"), [(CacheStatus.STORAGE2GPU, ReadStorageTask), (CacheStatus.GPU2STORAGE, WriteStorageTask)]
)
def test_the_older_storage_tuple_is_understood(event: CacheStatus, kind: type) -> None:
    item = read_item((event, "r1", ["a"], [5], 0.5))
    assert item.task("id", 9.0) == kind(task_id="id", timeout=0.5, keys=["a"], gpu_block_ids=[5])
    assert item.answers(result(Status.MISS, []), 1) == [(event, "r1", ["a"], [])]


def test_storage_events_without_a_known_name_are_told_apart_by_the_task() -> None:
    read = SimpleNamespace(task_id="r", keys=["a"], gpu_block_ids=[5], start_read_block_idx=0)
    write = SimpleNamespace(task_id="r", keys=["a"], gpu_block_ids=[5])
    assert isinstance(read_item((Numbers.STORE, read)).task("id", 1.0), ReadStorageTask)
    assert isinstance(read_item((Numbers.STORE, write)).task("id", 1.0), WriteStorageTask)


def test_block_ids_may_be_arrays() -> None:
    item = read_item((np.array([7]), np.array([1]), np.array([3]), CacheStatus.SWAP2CPU, "r1"))
    task = item.task("id", 1.0)
    assert isinstance(task, SwapOutTask)
    assert list(task.gpu_block_ids) == [1]


@pytest.mark.parametrize(
    "item",
    [
        None,
        "swap",
        (),
        (CacheStatus.SWAP2CPU,),
        (CacheStatus.GPU, "r1", [1], [1], [1]),
        (CacheStatus.SWAP2CPU, SimpleNamespace(task_id="r", keys=[], gpu_block_ids=[])),
        (CacheStatus.GPU2STORAGE, SimpleNamespace(task_id="r")),
        (CacheStatus.GPU2STORAGE, "r1", ["a"], [5]),
        ([1], [1], [1], CacheStatus.GPU2STORAGE, "r1"),
        (Numbers.STORE, "r1", ["a"], [5], 0.5),
        (SimpleNamespace(value="1"), "r1", [1], [1], [1]),
    ],
)
def test_an_item_of_unknown_shape_is_refused_at_once(item: Any) -> None:
    with pytest.raises(RequestError, match="not an item") as caught:
        read_item(item)
    assert caught.value.reason == "bad_item"


def test_a_control_request_is_known_by_its_event() -> None:
    event = SimpleNamespace(name="CTRL", value=-1)
    item = read_any_item((event, SimpleNamespace(method="pause", request_id="p", args=None)))
    assert isinstance(item, ControlItem)
    assert (item.method, item.args) == ("pause", {})
    with pytest.raises(RequestError, match="not an item"):
        read_any_item((event, SimpleNamespace(request_id="p")))
    with pytest.raises(RequestError, match="not an item"):
        read_any_item((SimpleNamespace(name="OTHER"), SimpleNamespace(method="pause")))
