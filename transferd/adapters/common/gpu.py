"""A rank's KV memory on an NVIDIA GPU: shared by CUDA IPC, its steps ordered by a timeline.

The engine's process of the rank allocates the memory, in any number of pieces. The daemon maps them once. Behind the
work of each step, vLLM's compute stream writes the step's number to a word in device memory, and the daemon waits on
the device for that number before it touches a block (docs/adr/0043). So no host waits for the GPU.

Two threads use this object: the engine's own, which launches steps, and the link's, which enters daemons.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from transferd.adapters.common.entry import Order, Point
from transferd.adapters.common.program import Program
from transferd.client.client import Client
from transferd.client.pages import PLANE, Pages
from transferd.errors import TierError
from transferd.tiers.base import DeviceHandle
from transferd.tiers.page_handles import cuda_pages

DEVICE = "cuda"  # cache.device of the engines that register


class Blocks(Protocol):
    """Where a tensor's blocks lie: offsets of the pieces of block 0, a piece's bytes, the bytes from block to block."""

    @property
    def pieces(self) -> Sequence[int]: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def stride(self) -> int: ...


class GpuMemory:
    """The memory of some tensors on one GPU. The engine owns it and keeps it allocated until the daemon is gone.

    program, instead: the engine's program, and what to use where this memory cannot be served.
    tensors, layers: each layer's tensor, and how its blocks lie.
    gather: called once by every rank, with its GPU; returns the GPUs of all ranks in order.
    stream: returns the CUDA stream that computes.
    kind: the daemon's device.
    driver: the real one if None.

    Raises TierError if the memory cannot be shared, naming the setting that causes it, or if the GPU lacks stream
    memory operations; then nothing was shared.
    """

    def __init__(
        self,
        rank: int,
        tensors: Sequence[Any],
        layers: Sequence[Blocks],
        *,
        program: Program,
        instead: str,
        gather: Callable[[str], Sequence[str]],
        stream: Callable[[], int],
        kind: str = DEVICE,
        driver: Any = None,
    ) -> None:
        from transferd.tiers.cuda.bindings import open_driver  # imported here because it needs CUDA

        self.rank = rank
        self._driver = driver if driver is not None else open_driver()
        self._device = _device_of(tensors)
        info = self._driver.describe(self._device)
        # Do this first, because every rank waits here for the others.
        self.cache: Mapping[str, Any] = {"device": kind, "devices": list(gather(info.uuid))}
        if not info.words:
            what = f"{info.name} has no stream memory operations, which are needed to wait for {program.title}'s steps"
            raise TierError(f"{what}: use {instead}", code="no_timelines")
        self._program = program
        storages: list[int] = []
        segments: list[tuple[int, int, int]] = []
        self._places: list[tuple[int, int, int]] = []  # address, bytes and stride of each segment
        for tensor, layer in zip(tensors, layers, strict=True):
            storage, start = tensor.untyped_storage().data_ptr(), tensor.data_ptr()
            if storage not in storages:
                storages.append(storage)
            which = storages.index(storage)
            segments += [(start - storage + piece, layer.stride, which) for piece in layer.pieces]
            self._places += [(start + piece, layer.nbytes, layer.stride) for piece in layer.pieces]
        self._handle = cuda_pages(storages, segments, device=self._device, driver=self._driver)
        self._stream = stream
        self._lock = threading.Lock()  # guards the words: one thread replaces them, another uses them
        self._words: Any = None
        self._failed = False
        self._last_stream = 0
        self._context = self._driver.retain(self._device)

    @property
    def order(self) -> Order:
        return Order.NONE if self._words is None or self._failed else Order.STREAM

    def handle(self) -> DeviceHandle:
        return self._handle

    def caches(self, layout: Pages) -> Mapping[str, Sequence[Any]]:
        from transferd.tiers.cuda.engine import CudaRows

        self._driver.allow_during_capture()  # another thread captures CUDA graphs while the engine starts
        rows = [
            CudaRows(self._driver, self._device, address, (layout.blocks, nbytes), 1, stride)
            for address, nbytes, stride in self._places
        ]
        return {PLANE: rows}

    async def entered(self, client: Client) -> None:
        """Map the rank's timelines, which belong to the daemon, and drop those of an earlier daemon."""
        from transferd.tiers.cuda.engine import timelines

        await asyncio.to_thread(self._drop)
        self._driver.allow_during_capture()
        words = timelines((await client.device_handle(self.rank))["data"], self._driver)
        if words is None:
            raise TierError(f"the daemon has no timelines for rank {self.rank}", code="no_timelines")
        self._words, self._failed = words, False

    def advance(self, after: Point) -> None:
        with self._lock:
            if self._words is None or self._failed:
                return
            try:
                self._last_stream = self._stream()
                self._words.advance(after, self._last_stream)
            except TierError as error:
                self._failed = True  # the words stay mapped: the stream may still write to them
                what = "transferd: not in use any more, %s runs without it: %s"
                self._program.log.warning(what, self._program.title, str(error))

    def _drop(self) -> None:
        """Unmap the words, after the stream's last write to them. Raises TierError."""
        with self._lock:
            words, self._words = self._words, None
        if words is not None:
            self._driver.allow_during_capture()
            with self._driver.current(self._context):
                self._driver.synchronize_stream(self._last_stream)

    def close(self) -> None:
        """Unmap everything. Idempotent."""
        with contextlib.suppress(TierError):  # the GPU is lost, and everything on it is freed
            self._drop()
            if self._context:
                self._context = 0
                self._driver.release(self._device)


def torch_stream() -> int:
    """The address of the CUDA stream on which this thread computes."""
    import torch

    return int(torch.cuda.current_stream().cuda_stream)


def _device_of(tensors: Sequence[Any]) -> int:
    devices = {tensor.device.index for tensor in tensors}
    if len(devices) != 1 or None in devices:
        raise TierError(f"the KV memory of a rank is on devices {sorted(map(str, devices))}; one is supported")
    return int(devices.pop())
