"""FastDeploy's compiled operators for exchanging and sending device memory, on the double's.

Written after custom_ops/gpu_ops of FastDeploy: names, arguments and order are its own. Tensors are Paddle's,
pointers are addresses in this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path
from typing import Any

import numpy as np

from tests.machine.with_fastdeploy.gpu import memory
from transferd.tiers.offered import DIRECTORY

__all__ = [
    "get_data_ptr_ipc",
    "get_output_kv_signal",
    "ipc_sent_key_value_cache_by_remote_ptr",
    "ipc_sent_key_value_cache_by_remote_ptr_block_sync",
    "set_data_ipc",
    "share_external_data",
    "unset_data_ipc",
]

_pipes: dict[Path, int] = {}  # those by which workers tell how far a prefill is


def set_data_ipc(tensor: Any, name: str) -> None:
    memory.export(tensor, name)


def share_external_data(empty: Any, name: str, shape: list[int]) -> Any:
    import paddle

    return memory.tensor_at(paddle, memory.opened(name), shape, str(empty.dtype).removeprefix("paddle."))


def unset_data_ipc(tensor: Any, name: str, close_ipc: bool, unlink_shm: bool) -> None:
    if close_ipc:
        memory.closed(tensor)
    if unlink_shm:
        (DIRECTORY / name).unlink()


def get_data_ptr_ipc(_: Any, name: str) -> int:
    return memory.opened(name)


def ipc_sent_key_value_cache_by_remote_ptr(
    keys: Any, values: Any, local_ids: Any, remote_ids: Any, remote_keys: int, remote_values: int, *_: Any
) -> None:
    """Copy blocks of one layer into another engine's memory."""
    for tensor, remote in ((keys, remote_keys), (values, remote_values)):
        array = memory.array_of(tensor)
        size = array.nbytes // len(array)
        for mine, theirs in zip(local_ids.tolist(), remote_ids.tolist(), strict=True):
            ctypes.memmove(remote + theirs * size, array.ctypes.data + mine * size, size)


def ipc_sent_key_value_cache_by_remote_ptr_block_sync(*_: Any) -> None:
    """Copies here are over when they return."""


def get_output_kv_signal(data: Any, rank: int, _wait: int) -> None:
    """What the attention kernels tell of a prefill: how many requests, the layer, and three numbers for each."""
    into, pipe = memory.array_of(data), _pipe(rank)
    count, layer = np.frombuffer(os.read(pipe, 8), dtype=np.int32)
    into[0], into[1] = count, layer
    into[2 : 2 + 3 * count] = np.frombuffer(os.read(pipe, 12 * count), dtype=np.int32)


def tell(rank: int, layer: int, requests: list[tuple[int, int, int]]) -> None:
    """A worker's side of `get_output_kv_signal`. requests: slot, tokens before this chunk, tokens in it."""
    message = np.array([len(requests), layer, *(number for one in requests for number in one)], dtype=np.int32)
    os.write(_pipe(rank), message.tobytes())


def _pipe(rank: int) -> int:
    """Made by whoever comes first. It stays open: unread messages go with the last descriptor."""
    path = Path(os.environ["FD_LOG_DIR"]) / f"kv_signal.{rank}"
    if path not in _pipes:
        with contextlib.suppress(FileExistsError):
            os.mkfifo(path)
        _pipes[path] = os.open(path, os.O_RDWR)  # O_RDWR: no end when a writer goes
    return _pipes[path]
