"""PaddleOps: FastDeploy's tensor-sharing operators on the CPU place, for tests; one process plays both sides.

It keeps the books that the real ones leave to a driver: what is published and under which handle, how often
it is mapped, and that memory is not let go of twice or under somebody who has it mapped.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from transferd.tiers.fastdeploy import COUNT_BYTES, HANDLE_BYTES, read
from transferd.tiers.offered import DIRECTORY


def publish(name: str, handle: bytes, directory: Path = DIRECTORY) -> None:
    """Write the object `name` as set_data_ipc does, at once, and in place of an earlier one."""
    assert len(handle) == HANDLE_BYTES
    temporary = directory / f".{name}.{os.getpid()}"
    temporary.write_bytes(bytes(COUNT_BYTES) + handle)
    temporary.rename(directory / name)


class PaddleOps:
    """A stand-in for the module fastdeploy.model_executor.ops.gpu. directory: in place of /dev/shm.

    mapped: adopted tensors by address and how often. A call that would be an error on a device raises
    RuntimeError, as Paddle does. `fail_at`: the name whose publication or adoption fails, once.
    """

    def __init__(self, paddle: Any, directory: Path) -> None:
        self._paddle = paddle
        self._directory = directory
        self._memory: dict[bytes, Any] = {}  # handle → the tensor's bytes
        self.published: dict[str, bytes] = {}
        self.mapped: dict[int, int] = {}
        self.fail_at = ""

    def set_data_ipc(self, tensor: Any, name: str) -> None:
        self._maybe_fail(name)
        handle = os.urandom(HANDLE_BYTES)
        self._memory[handle] = np.from_dlpack(tensor)
        self.published[name] = handle
        publish(name, handle, self._directory)

    def share_external_data(self, empty: Any, name: str, shape: list[int]) -> Any:
        self._maybe_fail(name)
        memory = self._memory[read(name, self._directory)]
        if str(empty.dtype) != "paddle.uint8" or memory.nbytes < int(np.prod(shape)):
            raise RuntimeError(f"(External) {name}: the memory is shorter than its shape")
        tensor = self._paddle.utils.dlpack.from_dlpack(memory.reshape(-1)[: int(np.prod(shape))].reshape(shape))
        self.mapped[tensor.data_ptr()] = self.mapped.get(tensor.data_ptr(), 0) + 1
        return tensor

    def unset_data_ipc(self, tensor: Any, name: str, close_ipc: bool, unlink_shm: bool) -> None:
        if close_ipc:
            address = tensor.data_ptr()
            if not self.mapped.get(address):
                raise RuntimeError(f"(External) {name} is not mapped")
            self.mapped[address] -= 1
        if unlink_shm:
            del self.published[name]
            (self._directory / name).unlink()

    def _maybe_fail(self, name: str) -> None:
        if name == self.fail_at:
            self.fail_at = ""
            raise RuntimeError(f"(External) {name}: out of handles (simulated)")
