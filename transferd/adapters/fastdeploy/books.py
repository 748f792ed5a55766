"""Corrects FastDeploy's PrefixCacheManager after a failed swap, which its own code does not handle.

FastDeploy's transfer processes reported only swaps that worked, so the manager treats every answer as a success.
The methods here wrap the manager's own: they call them first, and correct the tree if a swap failed.

    swap out failed   the blocks are still on the device, but room is needed: the nodes leave the tree with
                      everything below them, and their device and host blocks become free
    swap in failed    the request releases the nodes that it matched; the nodes leave the tree, their target blocks
                      become free, and the request is matched again: it recomputes the lost blocks

A node that another request has matched meanwhile stays: after a failed swap out its bytes are still on the device. So
no node stays in transit, no block is lost, and every block that the tree names has the right bytes.

With TRANSFERD_STORE_EVICTED=1, blocks that leave the host pool are stored first, if storage has not got them.
FastDeploy wrote them when their request finished, but storage may have been full or unavailable then, or may have
evicted them since. A block is free for the next swap at once; the daemon runs that swap after the write.

Locks. The tree changes under `request_release_lock`, states also under `cache_status_lock`. A swap in is awaited
with the first lock held. A swap out runs on its own thread, which holds no lock.
"""

from __future__ import annotations

import functools
import heapq
import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transferd.adapters.fastdeploy.engine_queue import EngineQueue
from transferd.errors import TransferError
from transferd.tasks import Status

log = logging.getLogger(__name__)

ATTEMPTS = 3  # attempts to match a request; each failure removes the failed nodes from the tree
Blocks = Mapping[Any, tuple[int, int]]  # node id -> its device block and its host block in a swap

STORE_EVICTED_VARIABLE = "TRANSFERD_STORE_EVICTED"
EVICTED_TIMEOUT_S = 5.0  # a swap to the same host block waits for the write

# .blocks: device blocks that the running request has received; .leaving: host blocks that the running eviction freed
_extra = threading.local()


@dataclass(frozen=True, slots=True)
class HostWrite:
    """Like FastDeploy's WriteStorageTask, but for host blocks."""

    task_id: str
    keys: Sequence[str]
    cpu_block_ids: Sequence[int]
    start_write_block_idx: int
    chains: Sequence[tuple[int, int, str]]
    gpu_block_ids: Sequence[int] = ()
    timeout: float = EVICTED_TIMEOUT_S


class SwapFailed(TransferError):
    """Blocks could not be swapped in from the host; the tree has been corrected."""

    code = "swap_failed"


def keep_right(manager: type[Any]) -> None:
    """Wrap the methods of FastDeploy's PrefixCacheManager. Call it once per class."""
    if "transferd_keeps_right" in vars(manager):
        return
    manager.transferd_keeps_right = True
    for name, around in _AROUND.items():
        if hasattr(manager, name):
            setattr(manager, name, _around(getattr(manager, name), around))


def _around(original: Callable[..., Any], around: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(getattr(self, "cache_task_queue", None), EngineQueue):
            return original(self, *args, **kwargs)
        return around(functools.partial(original, self), self, *args, **kwargs)

    return method


# --- the methods ------------------------------------------------------------------------------------


def _issue_swap_task(
    original: Callable[..., None],
    self: Any,
    transfer_task_id: Any,
    swap_node_ids: Sequence[Any],
    gpu_block_ids: Sequence[int],
    cpu_block_ids: Sequence[int],
    event_type: Any,
    is_sync: bool = True,
) -> None:
    before = {node_id: self.node_map.get(node_id) for node_id in swap_node_ids}
    original(transfer_task_id, swap_node_ids, gpu_block_ids, cpu_block_ids, event_type, is_sync)
    result = self.cache_task_queue.take_result(transfer_task_id, event_type)
    if result is None:  # the whole tree is being cleared
        return
    if result.status is Status.OK:
        if event_type.name == "SWAP2CPU" and _stores_evicted(self):
            held = _held_by_host(self)
            held.update((block, node) for block, node in zip(cpu_block_ids, before.values(), strict=True) if node)
        return
    blocks: Blocks = dict(zip(swap_node_ids, zip(gpu_block_ids, cpu_block_ids, strict=True), strict=True))
    if event_type.name == "SWAP2GPU":
        raise SwapFailed(f"{len(blocks)} blocks could not be swapped in: {result.error and result.error.message}")
    with self.request_release_lock, self.cache_status_lock:
        same = {node_id: pair for node_id, pair in blocks.items() if self.node_map.get(node_id) is before[node_id]}
        _give_up_swap_out(self, same, event_type)


def _give_up_swap_out(self: Any, blocks: Blocks, in_transit: Any) -> None:
    for node_id, (_, host_block) in blocks.items():
        node = self.node_map.get(node_id)
        if node is None:  # it left with a node above it
            continue
        if node.cache_status.value == in_transit.value:
            _drop(self, node, blocks)
        else:  # a request has matched it since: it stays on the device
            self.recycle_cpu_blocks(host_block)
    log.warning("%d blocks could not be swapped out; they leave the cache", len(blocks))


def _prepare_cpu_cache(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    try:
        original(*args, **kwargs)
    except SwapFailed as error:
        names = ("req_id", "swap_node_ids", "gpu_recv_block_ids")
        given = dict(zip(names, args, strict=False)) | kwargs
        with self.cache_status_lock:
            held = _let_go(self, given["req_id"])
            _give_up_swap_in(self, given["swap_node_ids"])
            _rest(self, held)
        blocks = set(getattr(_extra, "blocks", ())) | set(given["gpu_recv_block_ids"])
        self.recycle_gpu_blocks(sorted(blocks), given["req_id"])
        log.warning("request %s: %s; it recomputes them", given["req_id"], error)
        raise


def _give_up_swap_in(self: Any, node_ids: Iterable[Any]) -> None:
    status = type(self.radix_tree_root.cache_status)
    nodes = [self.node_map[node_id] for node_id in node_ids]
    for node in nodes:
        node.cache_status = status.CPU
    for node in nodes:
        if node.node_id in self.node_map and node.shared_count == 0:
            _drop(self, node, {})
    _rest(self, nodes)


def _match_again(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    for attempt in range(ATTEMPTS):
        _extra.blocks = []
        try:
            return original(*args, **kwargs)
        except SwapFailed:
            if attempt == ATTEMPTS - 1:
                raise
            self.metrics.req_count -= 1  # the retry is not another request
        finally:
            del _extra.blocks
    raise AssertionError("unreachable")


def _allocate_gpu_blocks(original: Callable[..., list[int]], _: Any, *args: Any, **kwargs: Any) -> list[int]:
    blocks = original(*args, **kwargs)
    if hasattr(_extra, "blocks"):
        _extra.blocks.extend(blocks)
    return blocks


def _issue_write_back(original: Callable[..., Any], self: Any, task: Any, is_sync: bool = True) -> Any:
    """Drop the answer to an eviction's flush: FastDeploy never fetches it, and would keep it for ever."""
    if is_sync:
        return original(task, is_sync)
    with self.cache_task_queue.answer_nobody(task.task_id):
        return original(task, is_sync)


def _free_cpu_block_ids(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Evict host blocks, and store them. They become free only when their writes are in the daemon's queue."""
    if not _stores_evicted(self):
        return original(*args, **kwargs)
    leaving: list[int] = []
    _extra.leaving = leaving
    try:
        return original(*args, **kwargs)
    finally:
        del _extra.leaving
        held = _held_by_host(self)
        try:
            for run in _root_first((held[block], block) for block in leaving if block in held):
                _store_evicted(self, run)
        finally:
            self.recycle_cpu_blocks(leaving)


def _recycle_cpu_blocks(original: Callable[..., Any], self: Any, cpu_block_ids: Any) -> Any:
    blocks = cpu_block_ids if isinstance(cpu_block_ids, list) else [cpu_block_ids]
    if hasattr(_extra, "leaving"):
        _extra.leaving += blocks
        return None
    for block in blocks:
        _held_by_host(self).pop(block, None)
    return original(cpu_block_ids)


def _stores_evicted(self: Any) -> bool:
    wanted = os.environ.get(STORE_EVICTED_VARIABLE) == "1"
    return wanted and self.kvcache_storage_backend not in (None, "attention_store")


def _held_by_host(self: Any) -> dict[int, Any]:
    """For each host block, the node that it holds. Entries of free blocks may be old, until the next swap out."""
    held: dict[int, Any] = vars(self).setdefault("transferd_held_by_host", {})
    return held


def _root_first(evicted: Iterable[tuple[Any, int]]) -> list[list[tuple[Any, int]]]:
    """Split what was evicted, leaf first, into runs of parent and child; each begins with the node nearest the root."""
    runs: list[list[tuple[Any, int]]] = []
    for node, block in evicted:
        if runs and runs[-1][-1][0].parent is node:
            runs[-1].append((node, block))
        else:
            runs.append([(node, block)])
    return [run[::-1] for run in runs]


def _store_evicted(self: Any, run: Sequence[tuple[Any, int]]) -> None:
    status = type(self.radix_tree_root.cache_status)
    start, before = run[0][0].depth - 1, run[0][0].parent
    write = HostWrite(
        task_id=f"evicted-{uuid.uuid4()}",
        keys=[node.hash_value for node, _ in run],
        cpu_block_ids=[block for _, block in run],
        start_write_block_idx=start,
        chains=[(0, start, before.hash_value if start else "")],
    )
    try:
        with self.cache_task_queue.answer_nobody(write.task_id):
            self.cache_task_queue.put_transfer_task((status.GPU2STORAGE, write))
    except TransferError as error:
        log.warning("%d evicted host blocks are not stored: %s", len(run), error)


_AROUND: dict[str, Callable[..., Any]] = {
    "issue_swap_task": _issue_swap_task,
    "_prepare_cpu_cache": _prepare_cpu_cache,
    "allocate_gpu_blocks": _allocate_gpu_blocks,
    "request_match_blocks": _match_again,
    "request_block_ids": _match_again,
    "issue_write_back_storage_task": _issue_write_back,
    "free_cpu_block_ids": _free_cpu_block_ids,
    "recycle_cpu_blocks": _recycle_cpu_blocks,
}


# --- the tree ---------------------------------------------------------------------------------------


def _drop(self: Any, node: Any, swapping: Blocks) -> None:
    """Remove a node that no request holds, and all nodes below it, from the tree; their blocks become free."""
    for child in list(node.children.values()):
        _drop(self, child, swapping)
    if node.parent is not None and node.parent.children.get(node.hash_value) is node:
        del node.parent.children[node.hash_value]
    for heap, members in (
        (self.gpu_lru_leaf_heap, self.gpu_lru_leaf_set),
        (self.cpu_lru_leaf_heap, self.cpu_lru_leaf_set),
    ):
        if node in members:
            members.remove(node)
            heap.remove(node)
            heapq.heapify(heap)
    del self.node_map[node.node_id]
    self.node_id_pool.append(node.node_id)
    if node.node_id in swapping:
        device_block, host_block = swapping[node.node_id]
        self.recycle_gpu_blocks(device_block)
        self.recycle_cpu_blocks(host_block)
    elif node.has_in_gpu:
        self.recycle_gpu_blocks(node.block_id)
    else:
        self.recycle_cpu_blocks(node.block_id)
    if node.parent is not None:
        _rest(self, [node.parent])


def _let_go(self: Any, request_id: Any) -> list[Any]:
    """Undo the counts of a match for this request; returns the nodes that it held."""
    held = [node for node in self.node_map.values() if request_id in node.req_id_set]
    for node in held:
        node.req_id_set.discard(request_id)
        node.decrement_shared_count()
    return held


def _rest(self: Any, nodes: Iterable[Any]) -> None:
    """Make leaves that no request holds evictable: the tree finds them in its two heaps."""
    for node in nodes:
        if node is self.radix_tree_root or node.shared_count or node.node_id not in self.node_map:
            continue
        if node.is_gpu_leaf_node and not node.is_persistent and node not in self.gpu_lru_leaf_set:
            self.gpu_lru_leaf_set.add(node)
            heapq.heappush(self.gpu_lru_leaf_heap, node)
        elif node.is_cpu_leaf_node and node not in self.cpu_lru_leaf_set:
            self.cpu_lru_leaf_set.add(node)
            heapq.heappush(self.cpu_lru_leaf_heap, node)
