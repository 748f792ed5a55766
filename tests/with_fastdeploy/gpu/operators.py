"""FastDeploy's compiled operators for exchanging and sending device memory, on the double's.

Written after custom_ops/gpu_ops of FastDeploy: names, arguments and order are its own. Tensors are Paddle's,
pointers are addresses in this process.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import numpy as np

from tests.with_fastdeploy.gpu import memory
from transferd.tiers.segment import DIRECTORY

__all__ = [
    "get_data_ptr_ipc",
    "get_output_kv_signal",
    "ipc_sent_key_value_cache_by_remote_ptr",
    "ipc_sent_key_value_cache_by_remote_ptr_block_sync",
    "set_data_ipc",
    "share_external_data",
    "unset_data_ipc",
]

_signals: dict[int, int] = {}  # rank → the pipe by which its worker tells how far a prefill is


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
    if rank not in _signals:
        _signals[rank] = os.open(pipe_of(rank), os.O_RDWR)  # O_RDWR: no end when a writer goes
    into = memory.array_of(data)
    count, layer = np.frombuffer(os.read(_signals[rank], 8), dtype=np.int32)
    into[0], into[1] = count, layer
    into[2 : 2 + 3 * count] = np.frombuffer(os.read(_signals[rank], 12 * count), dtype=np.int32)


def tell(rank: int, layer: int, requests: list[tuple[int, int, int]]) -> None:
    """A worker's side of `get_output_kv_signal`. requests: slot, tokens before this chunk, tokens in it."""
    message = np.array([len(requests), layer, *(number for one in requests for number in one)], dtype=np.int32)
    pipe = os.open(pipe_of(rank), os.O_RDWR)
    os.write(pipe, message.tobytes())
    if rank not in _signals:
        _signals[rank] = pipe  # kept open: what nobody has read yet goes with the last one who has it open


def pipe_of(rank: int) -> Path:
    """Made by whoever comes first."""
    path = Path(os.environ["FD_LOG_DIR"]) / f"kv_signal.{rank}"
    if not path.exists():
        os.mkfifo(path)
    return path
