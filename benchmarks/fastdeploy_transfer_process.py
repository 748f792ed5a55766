"""FastDeploy's own cache transfer process on a machine without a GPU, for fastdeploy_real.py.

Everything of it is FastDeploy's: its script, its main loop, its queue, barriers and thread pools, its file store. What
stands in are the compiled operators, which exist for accelerators only: device memory is shared memory, and the
two swap operators copy by memmove, one call for each run of neighbouring blocks of a layer, as the CUDA ones do by
cudaMemcpyAsync. And FileStore.query takes the five arguments that its caller gives (release/2.6 calls it with five and
defines three, so its file store answers nothing).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import fastdeploy.cache_manager.ops as operators
import paddle
from fastdeploy.cache_manager import prefix_cache_manager
from fastdeploy.cache_manager.transfer_factory import FileStore

from benchmarks.fastdeploy_real import segment

_keep: list[Any] = []
_addresses: dict[int, tuple[int, int]] = {}  # id of a tensor: its address and the bytes of a block


def _map(tensor: Any, name: str, shape: list[int]) -> Any:
    nbytes = 2
    for size in shape:
        nbytes *= size
    path = segment(name)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    if os.fstat(descriptor).st_size != nbytes:
        os.ftruncate(descriptor, nbytes)
    memory = mmap.mmap(descriptor, nbytes)
    os.close(descriptor)
    _keep.extend((memory, tensor))
    _addresses[id(tensor)] = (ctypes.addressof(ctypes.c_char.from_buffer(memory)), nbytes // shape[0])
    return tensor


def _host_alloc(nbytes: int) -> int:
    memory = mmap.mmap(-1, nbytes)
    _keep.append(memory)
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _runs(ids: list[int], others: list[int]) -> list[tuple[int, int, int]]:
    runs: list[tuple[int, int, int]] = []
    for one, other in zip(ids, others, strict=True):
        if runs and runs[-1][0] + runs[-1][2] == one and runs[-1][1] + runs[-1][2] == other:
            runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((one, other, 1))
    return runs


def _swap_all_layers(
    tensors: list[Any], pointers: list[int], _: int, device: list[int], host: list[int], __: int, mode: int
) -> None:
    runs = _runs(device, host)
    for tensor, pointer in zip(tensors, pointers, strict=True):
        address, block = _addresses[id(tensor)]
        for on_device, on_host, count in runs:
            there, here = address + on_device * block, pointer + on_host * block
            ctypes.memmove(*((there, here) if mode else (here, there)), count * block)


def _swap_layout(
    tensors: list[Any], pointer: int, _: list[int], device: list[int], host: list[int], __: int, mode: int
) -> None:
    for layer, tensor in enumerate(tensors):
        address, block = _addresses[id(tensor)]
        for on_device, on_host in zip(device, host, strict=True):
            there, here = address + on_device * block, pointer + (on_host * len(tensors) + layer) * block
            ctypes.memmove(*((there, here) if mode else (here, there)), block)


def stand_in() -> None:
    operators.set_device = lambda _: None
    operators.memory_allocated = lambda: 0
    operators.set_data_ipc = lambda tensor, name: _map(tensor, name, list(tensor.shape))
    operators.share_external_data_ = lambda tensor, name, shape, _: _map(tensor, name, list(shape))
    operators.unset_data_ipc = lambda *_: None
    operators.cuda_host_alloc = _host_alloc
    operators.cuda_host_free = lambda _: None
    operators.swap_cache_all_layers = _swap_all_layers
    operators.swap_cache_layout = _swap_layout
    query = FileStore.query
    FileStore.query = lambda self, k, v, _=None, __=None, timeout=10.0: query(self, k, v, timeout)


if __name__ == "__main__":
    paddle.device.set_device("cpu")
    stand_in()
    sys.argv[0] = str(Path(prefix_cache_manager.__file__).with_name("cache_transfer_manager.py"))
    runpy.run_path(sys.argv[0], run_name="__main__")
