"""The items that FastDeploy puts into its cache queue, and the answers that it expects, as values.

FastDeploy uses tuples. We understand all five shapes that have been in use (the CacheStatus members are
SWAP2CPU, SWAP2GPU, STORAGE2GPU, GPU2STORAGE):

    swap            (event, transfer_task_id, swap_node_ids, gpu_block_ids, cpu_block_ids)
    swap, older     (swap_node_ids, gpu_block_ids, cpu_block_ids, event, transfer_task_id)
    storage         (event, task)                     ReadStorageTask or WriteStorageTask of its cache_tasks
    storage, older  (event, request_id, keys, gpu_block_ids, timeout)
    control         (CTRL, request)                   see control.py; not answered in the queue

For swaps, an answer has the shape of the item; for storage it is (event, task_id, keys, gpu_block_ids).
An answer returns the caller's own event object. Its lists name the blocks that *every* rank moved: for a
read the prefix, for a write the blocks that are stored now, for a swap all or nothing.

This module imports nothing from FastDeploy. It recognises an event by the name of its enum member, or by its value
if that is known (1 and 2, the swaps; storage events never had published numbers). It recognises a task by
its attributes; newer ones may be missing.

The shapes are those of FastDeploy's cache_transfer_manager.py and prefix_cache_manager.py since release 2.0;
tests/machine/with_fastdeploy runs them against release/2.6 and develop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from transferd.errors import RequestError
from transferd.tasks import (
    DEFAULT_TIMEOUT_S,
    Lane,
    ReadStorageTask,
    Status,
    SwapInTask,
    SwapOutTask,
    Task,
    TaskResult,
    WriteStorageTask,
)

_BY_NAME = {
    "SWAP2CPU": Lane.SWAP_OUT,
    "SWAP2GPU": Lane.SWAP_IN,
    "STORAGE2GPU": Lane.READ,
    "GPU2STORAGE": Lane.WRITE,
}
_BY_VALUE = {1: Lane.SWAP_OUT, 2: Lane.SWAP_IN}
_SWAPS = (Lane.SWAP_OUT, Lane.SWAP_IN)

Answer = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class ControlItem:
    """A request to do something other than a transfer."""

    request: Any
    method: str
    args: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SwapItem:
    """A swap. `event_first`: whether it has the newer shape."""

    lane: Lane
    event: Any
    transfer_id: Any
    nodes: Sequence[Any]
    gpu: Sequence[int]
    cpu: Sequence[int]
    event_first: bool

    def task(self, task_id: str, swap_timeout: float) -> Task:
        """The task for this item. Raises TypeError if its lists are not lists."""
        kind = SwapOutTask if self.lane is Lane.SWAP_OUT else SwapInTask
        return kind(task_id=task_id, timeout=swap_timeout, gpu_block_ids=list(self.gpu), cpu_block_ids=list(self.cpu))

    def answers(self, result: TaskResult, ranks: int) -> list[Answer]:  # noqa: ARG002 - rank 0 alone reports a swap
        """The requested lists if every rank moved every block, else empty ones."""
        done = result.status is Status.OK
        nodes, gpu, cpu = (self.nodes, self.gpu, self.cpu) if done else ([], [], [])
        if self.event_first:
            return [(self.event, self.transfer_id, nodes, gpu, cpu)]
        return [(nodes, gpu, cpu, self.event, self.transfer_id)]


@dataclass(frozen=True, slots=True)
class StorageItem:
    """A read from storage or a write to it. `source` has the attributes that depend on FastDeploy's version."""

    lane: Lane
    event: Any
    transfer_id: Any
    keys: Sequence[str]
    gpu: Sequence[int]
    timeout: float
    source: Any = None

    def task(self, task_id: str, swap_timeout: float) -> Task:  # noqa: ARG002 - it has a timeout of its own
        """The task for this item. Raises TypeError or OverflowError for attributes of other types."""
        shared: dict[str, Any] = {
            "task_id": task_id,
            "timeout": self.timeout,
            "keys": list(self.keys),
            "token_ids": getattr(self.source, "token_ids", None),
            "salt": getattr(self.source, "salt", ""),
        }
        host = getattr(self.source, "cpu_block_ids", None)  # of evicted host blocks (books.py)
        shared |= {"gpu_block_ids": list(self.gpu)} if host is None else {"cpu_block_ids": list(host)}
        if self.lane is Lane.READ:
            return ReadStorageTask(start_read_block_idx=getattr(self.source, "start_read_block_idx", 0), **shared)
        exists = getattr(self.source, "flush_cache_exists", None)
        return WriteStorageTask(
            start_write_block_idx=getattr(self.source, "start_write_block_idx", 0),
            chains=list(getattr(self.source, "chains", ())) or msgspec.UNSET,
            # None means that the request has finished and its blocks are on the device. Without blocks none are there.
            flush_cache_exists=False if exists is None and host is None and len(self.gpu) == 0 else exists,
            **shared,
        )

    def answers(self, result: TaskResult, ranks: int) -> list[Answer]:
        """One answer per rank: FastDeploy counts them and takes the shortest.

        Since #7839 it also counts the answers to a write; earlier versions took the first and ignored the others.
        """
        return [(self.event, self.transfer_id, self.keys, list(result.block_ids)) for _ in range(ranks)]


Item = SwapItem | StorageItem


def read_item(item: Any) -> Item | ControlItem:
    """Parse an item. Raises RequestError if it has none of the module's shapes."""
    if not isinstance(item, tuple | list):
        raise _unknown(item)
    fields = list(item)
    if len(fields) == 2:
        return _control(*fields) or _storage_task(item, *fields)
    if len(fields) != 5:
        raise _unknown(item)
    event_first = not _is_ids(fields[0])
    if not event_first:  # the older order of a swap
        fields = [fields[3], fields[4], *fields[:3]]
    event, transfer_id, first, second, third = fields
    lane = _lane(event)
    if lane is None or (lane not in _SWAPS and not event_first):
        raise _unknown(item)
    if lane in _SWAPS:
        return SwapItem(lane, event, transfer_id, first, second, third, event_first)
    return StorageItem(lane, event, transfer_id, keys=first, gpu=second, timeout=third)


def _control(event: Any, request: Any) -> ControlItem | None:
    if getattr(event, "name", "") != "CTRL" or not isinstance(getattr(request, "method", None), str):
        return None
    return ControlItem(request, request.method, getattr(request, "args", None) or {})


def _storage_task(item: Any, event: Any, task: Any) -> StorageItem:
    lane = _lane(event)
    try:
        transfer_id, keys, gpu = task.task_id, task.keys, task.gpu_block_ids
    except AttributeError:
        raise _unknown(item) from None
    if lane is None:
        lane = Lane.READ if hasattr(task, "start_read_block_idx") else Lane.WRITE
    if lane in _SWAPS:
        raise _unknown(item)
    return StorageItem(lane, event, transfer_id, keys, gpu, getattr(task, "timeout", DEFAULT_TIMEOUT_S), task)


def _lane(event: Any) -> Lane | None:
    lane = _BY_NAME.get(getattr(event, "name", ""))
    if lane is not None:
        return lane
    value = getattr(event, "value", event)
    return _BY_VALUE.get(value) if isinstance(value, int) else None


def _is_ids(field: Any) -> bool:
    return isinstance(field, list | tuple) or hasattr(field, "tolist")


def _unknown(item: Any) -> RequestError:
    return RequestError(f"not an item of FastDeploy's cache queue: {str(item)[:200]}", code="bad_item")
