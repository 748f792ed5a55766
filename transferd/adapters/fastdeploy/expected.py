"""What the plugin wraps, calls and reads of FastDeploy, as release/2.5, release/2.6 and develop have it.

It is compared once, when FastDeploy makes its first cache queue. Each of these is a difference: a name is missing or
takes other parameters, a status has another number, FastDeploy calls a method of its cache queue that ours lacks. The
plugin then logs the differences in one line and does nothing, so FastDeploy starts its own transfer processes. New
parameters with defaults, and names that the plugin does not use, are no difference.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import operator
import re
import sys
from collections.abc import Iterator
from typing import Any

from transferd.adapters.fastdeploy.queue import EngineCacheQueue
from transferd.adapters.fastdeploy.signals import NAMES

log = logging.getLogger(__name__)

MANAGER = "fastdeploy.cache_manager.prefix_cache_manager"
QUEUES = "fastdeploy.inter_communicator"
DATA = "fastdeploy.cache_manager.cache_data"
ENGINE = "fastdeploy.engine.common_engine:EngineService"

# The parameters that the plugin gives or takes, in order.
SIGNATURES = {
    f"{MANAGER}:PrefixCacheManager.issue_swap_task": (
        "transfer_task_id", "swap_node_ids", "gpu_block_ids", "cpu_block_ids", "event_type", "is_sync",
    ),
    f"{MANAGER}:PrefixCacheManager._prepare_cpu_cache": ("req_id", "swap_node_ids", "gpu_recv_block_ids"),
    f"{MANAGER}:PrefixCacheManager.allocate_gpu_blocks": ("num_blocks",),
    f"{MANAGER}:PrefixCacheManager.request_match_blocks": ("task", "block_size"),
    f"{MANAGER}:PrefixCacheManager.request_block_ids": ("task", "block_size", "dec_token_num"),
    f"{MANAGER}:PrefixCacheManager.issue_write_back_storage_task": ("task", "is_sync"),
    f"{MANAGER}:PrefixCacheManager.recycle_gpu_blocks": ("gpu_block_ids", "req_id"),
    f"{MANAGER}:PrefixCacheManager.recycle_cpu_blocks": ("cpu_block_ids",),
    f"{MANAGER}:PrefixCacheManager.free_cpu_block_ids": ("need_block_num",),
    f"{DATA}:BlockNode.decrement_shared_count": (),
    f"{QUEUES}.engine_cache_queue:EngineCacheQueue": (
        "address", "authkey", "is_server", "num_client", "client_id", "local_data_parallel_size",
        "local_data_parallel_id",
    ),
    f"{QUEUES}:IPCSignal": ("name", "array", "dtype", "suffix", "create"),
    f"{QUEUES}.fmq:FMQ.queue": ("name", "role"),
    f"{QUEUES}.fmq:Queue.put": ("data",),
    f"{QUEUES}.fmq:Queue.close": (),
    "fastdeploy.engine.request:ControlResponse": ("request_id", "error_code", "error_message"),
    "fastdeploy.platforms:current_platform.is_cuda": (),
}  # fmt: skip
# The names that the source of a class has.
ATTRIBUTES = {
    f"{MANAGER}:PrefixCacheManager": (
        "node_map", "node_id_pool", "gpu_lru_leaf_heap", "gpu_lru_leaf_set", "cpu_lru_leaf_heap", "cpu_lru_leaf_set",
        "request_release_lock", "cache_status_lock", "radix_tree_root", "metrics", "cache_task_queue",
        "kvcache_storage_backend",
        "subprocess.Popen", '"cache_task_inflight"', '"cache_task_is_paused"',
    ),
    ENGINE: (
        '"cache_ready_signal"', '"swap_space_ready_signal"', '"cache_transfer_inited_signal"', '"kv_cache_status"',
        "ctrl_c2e_rank",
    ),
    f"{QUEUES}:IPCSignal": (".value",),
    f"{DATA}:BlockNode": (
        "cache_status", "req_id_set", "shared_count", "parent", "children", "hash_value", "node_id", "block_id",
        "has_in_gpu", "is_gpu_leaf_node", "is_cpu_leaf_node", "is_persistent", "depth",
    ),
    f"{DATA}:CacheStatus": ("CPU", "SWAP2CPU", "SWAP2GPU", "GPU2STORAGE", "STORAGE2GPU", "CTRL"),
    "fastdeploy.cache_manager.cache_metrics:CacheMetrics": ("req_count",),
    "fastdeploy.cache_manager.cache_tasks:CacheTask": ("task_id", "keys", "token_ids", "gpu_block_ids"),
    "fastdeploy.cache_manager.cache_tasks:ReadStorageTask": ("start_read_block_idx", "timeout"),
    "fastdeploy.cache_manager.cache_tasks:WriteStorageTask": ("timeout",),
    "fastdeploy.engine.request:ControlRequest": ("request_id", "method", "args"),
}  # fmt: skip
STATUSES = f"{QUEUES}:KVCacheStatus"
CALLERS = (f"{MANAGER}:PrefixCacheManager", ENGINE)
_CALL = re.compile(r"cache_task_queue\.(\w+)\(")


@functools.cache
def as_expected() -> bool:
    """Whether this FastDeploy has all of it. Logs one line if not."""
    if "fastdeploy" not in sys.modules:
        return True
    if found := differences():
        what = "this FastDeploy is not one that transferd knows, so transferd does nothing: %s"
        log.error(what, "; ".join(found))
    return not found


def differences() -> list[str]:
    """What is missing or different, one text each."""
    found = [why for path, wanted in SIGNATURES.items() if (why := _called(path, wanted))]
    for path, names in ATTRIBUTES.items():
        for source in _source(path, found):
            found += [f"{path} has no {name}" for name in names if name not in source]
    for path in CALLERS:
        for source in _source(path, []):
            lacking = sorted(name for name in set(_CALL.findall(source)) if not hasattr(EngineCacheQueue, name))
            found += [f"{path} calls cache_task_queue.{name}, which transferd's queue has not" for name in lacking]
    return found + _statuses()


def _source(path: str, found: list[str]) -> Iterator[str]:
    """The source of a class with those that it inherits from; none, with a text in `found`, if it is missing."""
    try:
        classes = inspect.getmro(_at(path))
    except (ImportError, AttributeError) as error:
        found.append(f"{path}: {error}")
        return
    seen = []
    for one in classes:
        with contextlib.suppress(OSError, TypeError):  # compiled: nothing can be seen
            seen.append(inspect.getsource(one))
    if seen:
        yield "".join(seen)


def _statuses() -> list[str]:
    """What differs in the numbers of kv_cache_status."""
    try:
        theirs = _at(STATUSES)
    except (ImportError, AttributeError) as error:
        return [f"{STATUSES}: {error}"]
    return [
        f"{STATUSES}.{name} is {getattr(theirs, name, None)}, not {number}"
        for number, name in NAMES.items()
        if getattr(theirs, name, None) != number
    ]


def _called(path: str, wanted: tuple[str, ...]) -> str:
    """Why we cannot call this with our parameters; "" if we can."""
    try:
        parameters = [one for one in inspect.signature(_at(path)).parameters.values() if one.name != "self"]
    except (ImportError, AttributeError) as error:
        return f"{path}: {error}"
    except (TypeError, ValueError):  # compiled
        return ""
    names = tuple(one.name for one in parameters)
    needed = [
        one.name for one in parameters[len(wanted) :] if one.default is one.empty and one.kind < one.VAR_POSITIONAL
    ]
    if names[: len(wanted)] == wanted and (not needed or path in _LONGER):
        return ""
    return f"{path}({', '.join(names)}) is not ({', '.join(wanted)}, …)"


# We look at the first parameters of these and hand on all of them.
_LONGER = (f"{MANAGER}:PrefixCacheManager._prepare_cpu_cache", f"{MANAGER}:PrefixCacheManager.request_block_ids")


def _at(path: str) -> Any:
    module, _, names = path.partition(":")
    return operator.attrgetter(names)(importlib.import_module(module))
