"""The other process of the checks: an engine that maps the daemon's cache, or that has one of its own.

    python -m tests.machine.gpu.peer DEVICE

One JSON object a line: a command on stdin, {"ok": …} or {"error": …} on stdout. It ends with its stdin.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.machine.gpu import descriptor
from tests.machine.gpu.neighbour import Kind, Neighbour
from transferd.blocks.layout import build_layout
from transferd.config import CacheSection
from transferd.errors import TierError
from transferd.tiers.cuda import engine, ipc
from transferd.tiers.cuda.bindings import open_driver
from transferd.tiers.cuda.engine import Attached, DeviceArray
from transferd.tiers.fastdeploy import segment_name
from transferd.tiers.offered import DIRECTORY


class Peer:
    """What the commands act on. Every method is one."""

    def __init__(self, device: int) -> None:
        self.driver = open_driver()
        self.device = device
        self.context = self.driver.retain(device)
        with self.driver.current(self.context):
            self.stream = self.driver.create_stream()
        self.streams = [self.stream]
        self.attached: Attached | None = None
        self.arrays: list[DeviceArray] = []
        self.kept: list[Any] = []

    def attach(self, data: dict[str, Any]) -> int:
        """Map the daemon's cache. Returns how many arrays it has."""
        self.attached = engine.attach(data)
        self.arrays = [array for arrays in self.attached.caches.values() for array in arrays]
        return len(self.arrays)

    def detach(self) -> None:
        """Drop every array, and with the last one the mapping."""
        self.arrays = []
        self.attached = None

    def own(self, cache: dict[str, Any], apart: bool) -> dict[str, Any]:
        """Allocate a cache, each array apart or all in one allocation, and export it."""
        layout = build_layout(CacheSection(**cache))
        sizes = [layout.device_blocks_of(part.layer) * part.nbytes for part in layout.segments]
        with self.driver.current(self.context):
            start = 0 if apart else self.driver.allocate(sum(size + 512 for size in sizes)) + 256
            caches: dict[str, list[DeviceArray]] = {}
            for part, size in zip(layout.segments, sizes, strict=True):
                address = self.driver.allocate(size) if apart else start
                start += (size + 511) // 256 * 256
                shape = (layout.device_blocks_of(part.layer), *part.plane.shape)
                array = DeviceArray(address, shape, part.plane.numpy_dtype.name, self.device, None)
                caches.setdefault(part.plane.name, []).append(array)
        self.arrays = [array for arrays in caches.values() for array in arrays]
        return engine.export(caches, device=self.device)

    def first_bytes(self, handles: list[str]) -> list[dict[str, Any]]:
        """Open each of these handles of memory, and read the first byte; or what the driver says."""
        found: list[dict[str, Any]] = []
        with self.driver.current(self.context):
            for handle in handles:
                try:
                    address = self.driver.open_memory(bytes.fromhex(handle))
                    byte = np.zeros(1, dtype=np.uint8)
                    self.driver.copy(byte.ctypes.data, address, 1, self.stream)
                    self.driver.synchronize_stream(self.stream)
                    start, nbytes = self.driver.address_range(address)
                    found.append({"byte": int(byte[0]), "into its range": address - start, "range": nbytes})
                except TierError as error:
                    found.append({"error": str(error)})
        return found

    def publish(self, cache: dict[str, Any], rank: int) -> list[str]:
        """Allocate each array apart and publish it as FastDeploy does. Returns the files, which are the caller's."""
        layout = build_layout(CacheSection(**cache))
        paths, self.arrays = [], []
        with self.driver.current(self.context):
            for part in layout.segments:
                shape = (layout.device_blocks_of(part.layer), *part.plane.shape)
                # As large as an engine's are: what handles of smaller ones name is a question of its own (probe.py).
                address = self.driver.allocate(max(shape[0] * part.nbytes, ipc.BLOCK))
                self.arrays.append(DeviceArray(address, shape, part.plane.numpy_dtype.name, self.device, None))
                path = DIRECTORY / segment_name(part.plane.name, part.layer, rank, self.device)
                path.write_bytes(bytes(8) + self.driver.export_memory(address))
                paths.append(str(path))
        return paths

    def torch_own(self, cache: dict[str, Any]) -> dict[str, Any] | None:
        """The same with tensors from torch's allocator; None without torch."""
        try:
            import torch
        except ImportError:
            return None
        layout = build_layout(CacheSection(**cache))
        types = {"uint16": torch.bfloat16, "float16": torch.float16, "uint8": torch.uint8, "float32": torch.float32}
        caches: dict[str, list[Any]] = {}
        for part in layout.segments:
            shape = (layout.device_blocks_of(part.layer), *part.plane.shape)
            dtype = types[part.plane.numpy_dtype.name]
            caches.setdefault(part.plane.name, []).append(torch.empty(shape, dtype=dtype, device=f"cuda:{self.device}"))
        self.kept.append(caches)
        tensors = [tensor for arrays in caches.values() for tensor in arrays]
        self.arrays = [
            DeviceArray(tensor.data_ptr(), tuple(tensor.shape), "uint8", self.device, tensor)
            for tensor in (tensor.view(torch.uint8) for tensor in tensors)
        ]
        return engine.export(caches, device=self.device)

    def odd_memory(self, kind: str) -> str:
        """Export memory that an allocator has made in its own way: "shared", or the code and message of the refusal."""
        with self.driver.current(self.context):
            if kind == "cuMemAlloc":
                address = self.driver.allocate(1 << 21)
            elif kind == "cuMemCreate":
                address, *_ = descriptor.create(self.device, 1 << 21)
            else:
                address = descriptor.pooled(1 << 21, self.stream)
        try:
            engine.export_pages([address], [[0, 4096]], device=self.device)
        except TierError as error:
            return f"{error.reason}: {error}"
        return "shared"

    def by_descriptor(self, value: int) -> dict[str, int]:
        """Make memory with this in every byte, and a descriptor for it."""
        with self.driver.current(self.context):
            address, handle, nbytes = descriptor.create(self.device, 1 << 21)
            self.driver.fill(address, value, nbytes, self.stream)
            self.driver.synchronize_stream(self.stream)
        self.kept.append(handle)
        return {"fd": descriptor.exported(handle), "nbytes": nbytes, "value": value}

    def fill(self, seed: int) -> None:
        """Random bytes in every array, waited for."""
        with self.driver.current(self.context):
            for array, content in zip(self.arrays, self._contents(seed), strict=True):
                self.driver.copy(array.address, content.ctypes.data, array.nbytes, self.stream)
                self.driver.synchronize_stream(self.stream)

    def verify(self, seed: int) -> str:
        """What is wrong with the arrays, if they should be as after fill(seed)."""
        for number, (array, expected) in enumerate(zip(self.arrays, self._contents(seed), strict=True)):
            found = self._read(array)
            if not np.array_equal(found, expected):
                return f"array {number} differs in {int((found != expected).sum())} of {len(found)} bytes"
        return ""

    def digest(self) -> list[int]:
        """A sum over each array, for a comparison without the bytes."""
        return [int(self._read(array).astype(np.uint64).sum()) for array in self.arrays]

    def late_fill(self, value: int, before: int) -> None:
        """Keep the stream busy, then fill every array with `value`, record the event: and wait for nothing."""
        with self.driver.current(self.context):
            for _ in range(before):
                for array in self.arrays:
                    self.driver.fill(array.address, 0xEE, array.nbytes, self.stream)
            for array in self.arrays:
                self.driver.fill(array.address, value, array.nbytes, self.stream)
        assert self.attached is not None
        assert self.attached.ready is not None, "this device shares no events"
        self.attached.ready.record(self.stream)

    def shares(self) -> str:
        """What else of the handle this process has."""
        assert self.attached is not None
        event, words = self.attached.ready, self.attached.timelines
        return f"{'an event' if event else 'no event'}, {'timelines' if words else 'no timelines'}"

    def busy(self, step: int, kind: Kind = "fills") -> None:
        """Keep the GPU busy until `rest`. step: bytes that one of the fills has. kind: see neighbour.py."""
        self.neighbour = Neighbour(self.driver, self.context, self.device, kind, step)

    def rest(self) -> dict[str, float]:
        """Steps a second, and the median and 99th percentile of their seconds."""
        return self.neighbour.rest()

    def compute(self, value: int, after: list[int], wait_s: float = 0.0, stream: int = 0) -> None:
        """After a while, fill every array with `value` and advance the timeline; wait for nothing."""
        time.sleep(wait_s)  # the host thread of a rank that is behind
        while len(self.streams) <= stream:
            with self.driver.current(self.context):
                self.streams.append(self.driver.create_stream())
        with self.driver.current(self.context):
            for array in self.arrays:
                self.driver.fill(array.address, value, array.nbytes, self.streams[stream])
        assert self.attached is not None
        assert self.attached.timelines is not None
        self.attached.timelines.advance((after[0], after[1]), self.streams[stream])
        if stream == 0:
            self.finish()

    def finish(self) -> float:
        """Wait for the stream; the seconds that took."""
        before = time.monotonic()
        with self.driver.current(self.context):
            self.driver.synchronize_stream(self.stream)
        return time.monotonic() - before

    def frameworks(self) -> dict[str, str]:
        """Have each framework that is here take the first array without a copy, and say what it became."""
        array, found = self.arrays[0].view("int16") if self.arrays[0].dtype.itemsize == 2 else self.arrays[0], {}
        ways: tuple[tuple[str, Callable[[], Any]], ...] = (
            ("torch, DLPack", lambda: __import__("torch").from_dlpack(array)),
            ("torch, array interface", lambda: __import__("torch").as_tensor(array, device=f"cuda:{self.device}")),
            ("cupy, array interface", lambda: __import__("cupy").asarray(array)),
            ("cupy, DLPack", lambda: __import__("cupy").from_dlpack(array)),
        )
        for name, take in ways:
            try:
                taken = take()
            except ImportError:
                continue
            address = taken.data_ptr() if hasattr(taken, "data_ptr") else taken.data.ptr
            if address != array.address:
                raise AssertionError(f"{name} made a copy")
            found[name] = str(taken.dtype)
        return found

    def _contents(self, seed: int) -> list[np.ndarray[Any, np.dtype[np.uint8]]]:
        rng = np.random.default_rng(seed)
        return [rng.integers(0, 256, array.nbytes, dtype=np.uint8) for array in self.arrays]

    def _read(self, array: DeviceArray) -> np.ndarray[Any, np.dtype[np.uint8]]:
        content = np.empty(array.nbytes, dtype=np.uint8)
        with self.driver.current(self.context):
            self.driver.copy(content.ctypes.data, array.address, array.nbytes, self.stream)
            self.driver.synchronize_stream(self.stream)
        return content


def serve(peer: Any) -> None:
    """Obey: a command is a method's name and arguments. What libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(json.dumps({"ok": "ready"}), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = {"ok": getattr(peer, command.pop("do"))(**command)}
        except Exception as error:  # noqa: BLE001 - all of it is for the check to tell
            answer = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    serve(Peer(int(sys.argv[1])))
