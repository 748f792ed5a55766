"""The double's memory as Paddle's tensors: allocated, published under FastDeploy's names, mapped in another process."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.support.cuda.memory import Memory
from tests.support.paddle_ops import publish
from transferd.tiers.fastdeploy import read

SMALLEST_RANK = 3  # dimensions of a tensor of the KV cache; whatever has fewer stays where Paddle keeps it


@functools.cache
def memory() -> Memory:
    """What this process has allocated and mapped."""
    return Memory(8 << 30, "allocations")  # FastDeploy opens what its handles name as the tensor itself


# What Paddle frees calls into Python, which deadlocks where threads stand in for processes: nothing is freed meanwhile.
_kept: list[Any] = []


def tensor_at(paddle: Any, start: int, shape: Sequence[int], dtype: str) -> Any:
    """A tensor over bytes that exist."""
    size = int(np.prod(shape)) * _itemsize(dtype)
    array = np.ctypeslib.as_array((ctypes.c_ubyte * size).from_address(start))
    _kept.append(paddle.utils.dlpack.from_dlpack(array.view(f"int{8 * _itemsize(dtype)}").reshape(list(shape))))
    return _kept[-1].view(dtype)


def new_tensor(paddle: Any, shape: Sequence[int], dtype: str) -> Any:
    allocation = memory().allocate(int(np.prod(shape)) * _itemsize(dtype))
    assert allocation is not None, "the double's memory is full"
    return tensor_at(paddle, allocation.start, shape, dtype)


def release() -> None:
    """Give back all that this process has allocated. Nobody may use it any more."""
    _kept.clear()
    for allocation in list(memory().owned.values()):
        memory().free(allocation)


def full_of(paddle: Any) -> Callable[..., Any]:
    """paddle.full that makes tensors of a cache in the double's memory."""
    real = paddle.full

    def full(shape: Any, fill_value: Any, dtype: Any = None, name: Any = None) -> Any:
        if not isinstance(shape, list | tuple) or len(shape) < SMALLEST_RANK:
            return real(shape, fill_value, dtype, name)
        made = new_tensor(paddle, shape, _name(dtype or paddle.get_default_dtype()))
        return made.fill_(fill_value)

    return full


def to_tensor_of(paddle: Any) -> Callable[..., Any]:
    """paddle.to_tensor that knows the place of the double."""
    real = paddle.to_tensor

    def to_tensor(data: Any, dtype: Any = None, place: Any = None, stop_gradient: bool = True) -> Any:
        if not (isinstance(place, str) and place.startswith("gpu")):
            return real(data, dtype, place, stop_gradient)
        made = new_tensor(paddle, data.shape, str(data.dtype))
        return made.copy_(real(data), True)

    return to_tensor


def export(tensor: Any, name: str) -> None:
    """Write the IPC handle of a tensor's allocation, as set_data_ipc does."""
    allocation = memory().find(int(tensor.data_ptr()), 1)
    if allocation is None or allocation.kind != "device":
        raise RuntimeError(f"(External) {name}: not this process's device memory")
    publish(name, allocation.handle.encode().ljust(64, b"\0"))


def opened(name: str) -> int:
    """Map the memory behind a published name; its address."""
    return memory().open(read(name).rstrip(b"\0").decode()).start


def closed(tensor: Any) -> None:
    """Unmap. Raises KeyError for what is not mapped."""
    known = memory()
    known.close(known.opened[int(tensor.data_ptr())])


def array_of(tensor: Any) -> np.ndarray[Any, Any]:
    """The tensor's memory as numbers of its width; numpy has no bfloat16."""
    made: np.ndarray[Any, Any] = np.from_dlpack(tensor.view(f"int{8 * _itemsize(_name(tensor.dtype))}"))
    return made


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("paddle.")


def _itemsize(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
