"""Reads and writes an engine's arrays in GPU memory, block by block, from the host: for the canary of an offer."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from typing import Any

from transferd.tiers.cuda.bindings import open_driver
from transferd.tiers.cuda.driver import Driver
from transferd.tiers.cuda.engine import described

_STREAM = 0


class CudaRows:
    """One array of blocks on GPU `device`; each block is contiguous. Borrows the memory.

    stride: bytes from block to block; None: the blocks are dense.

    Its copies are not ordered after other work on the device: let all work on the block end first.
    """

    def __init__(
        self, driver: Driver, device: int, address: int, shape: Sequence[int], itemsize: int, stride: int | None = None
    ) -> None:
        self.blocks = shape[0]
        self._driver = driver
        self._device = device
        self._address = address
        self._nbytes = math.prod(shape[1:]) * itemsize  # of a block
        self._stride = self._nbytes if stride is None else stride

    def read_block(self, block: int) -> bytes:
        buffer = ctypes.create_string_buffer(self._nbytes)
        self._copy(ctypes.addressof(buffer), self._address + block * self._stride)
        return buffer.raw

    def write_block(self, block: int, data: bytes) -> None:
        assert len(data) == self._nbytes
        buffer = ctypes.create_string_buffer(data, self._nbytes)
        self._copy(self._address + block * self._stride, ctypes.addressof(buffer))

    def _copy(self, target: int, source: int) -> None:
        driver = self._driver
        context = driver.retain(self._device)
        try:
            with driver.current(context):
                driver.copy(target, source, self._nbytes, _STREAM)
                driver.synchronize_stream(_STREAM)
        finally:
            driver.release(self._device)


def rows(
    caches: Mapping[str, Sequence[Any]], *, device: int, driver: Driver | None = None
) -> dict[str, list[CudaRows]]:
    """{plane: [one CudaRows per layer]}. Takes the same caches as `engine.export`, and raises RequestError like it."""
    driver = driver if driver is not None else open_driver()
    made: dict[str, list[CudaRows]] = {}
    for plane, layers in caches.items():
        for layer, array in enumerate(layers):
            address, shape, dtype = described(array, f"{plane} of layer {layer}")
            itemsize = {"uint8": 1, "uint16": 2, "float16": 2, "float32": 4}[dtype]
            made.setdefault(plane, []).append(CudaRows(driver, device, address, shape, itemsize))
    return made
