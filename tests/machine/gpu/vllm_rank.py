"""A worker of vLLM as TransferdConnector has it there, without vLLM: tensors, a compute stream, the worker's half.

    python -m tests.machine.gpu.vllm_rank DEVICE

Commands as in peer.py. The tensors are torch's where there is torch, and otherwise stand-ins over the driver's memory.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.machine.gpu.peer import serve
from tests.support.cuda.abi import SERVED
from tests.support.cuda.tensor import GpuTensor, extent, layer_views
from transferd.adapters.common.entry import EngineFacts
from transferd.adapters.common.gpu import GpuMemory, torch_stream
from transferd.adapters.vllm.layers import blocks_of
from transferd.adapters.vllm.settings import VLLM, AdapterSettings
from transferd.adapters.vllm.working import INSTEAD, Working
from transferd.tiers.cuda.bindings import open_driver

ITEM = 2
READY_S = 60.0
TOKEN = "the token of this engine"


class VllmRank:
    """What the commands act on. Every public method is one."""

    def __init__(self, device: int) -> None:
        self.driver, self.device = open_driver(), device
        self.context = self.driver.retain(device)

    def start(self, endpoint: str, rank: int, ranks: int, layout: str, shape: Sequence[int], kind: str) -> str:
        """Allocate, register and offer, as vLLM's register_kv_caches has it. shape: as layer_views wants it."""
        views = layer_views(layout, shape, ITEM)
        self.blocks, self.nbytes = shape[1], extent(shape, ITEM)
        made = self._torch(views) or self._plain(views)
        self.busy_bytes = extent(shape, ITEM)
        with self.driver.current(self.context):
            self.busy = self.driver.allocate(self.busy_bytes)
        self.named = {f"layer {number}": tensor for number, tensor in enumerate(self.tensors)}
        self.lie = blocks_of(self.named, self.blocks)
        memory = GpuMemory(
            rank,
            self.tensors,
            list(self.lie.values()),
            program=VLLM,
            instead=INSTEAD,
            gather=lambda own: [own] * ranks,
            stream=lambda: self.stream,
            kind=kind,
        )
        pages = [one.nbytes for one in self.lie.values() for _ in one.pieces]
        facts = EngineFacts("vllm", "model", "", f"vllm/{layout}", ranks, self.blocks, pages, memory, TOKEN)
        self.working = Working(facts, AdapterSettings(endpoint=endpoint))
        return made

    def _torch(self, views: Sequence[Any]) -> str:
        if SERVED in os.environ:
            return ""  # torch would look for a GPU that is not there
        try:
            import torch
        except ImportError:
            return ""
        self.kept = torch.full((self.nbytes,), 0xEE, dtype=torch.uint8, device=f"cuda:{self.device}")
        torch.cuda.set_stream(torch.cuda.Stream(self.device))
        self.stream, self.start_address = torch_stream(), self.kept.data_ptr()
        halves = self.kept.view(torch.float16)
        self.tensors = [torch.as_strided(halves, shape, strides, offset // ITEM) for offset, shape, strides in views]
        torch.cuda.synchronize(self.device)
        return f"torch {torch.__version__}"

    def _plain(self, views: Sequence[Any]) -> str:
        with self.driver.current(self.context):
            self.start_address, self.stream = self.driver.allocate(self.nbytes), self.driver.create_stream()
            self.driver.fill(self.start_address, 0xEE, self.nbytes, self.stream)
            self.driver.synchronize_stream(self.stream)
        self.tensors = [
            GpuTensor(self.start_address, offset, shape, strides, ITEM, self.device) for offset, shape, strides in views
        ]
        return "no torch"

    def ready(self) -> str:
        """Wait until the daemon has mapped every rank, and this one its timelines."""
        give_up = time.monotonic() + READY_S
        while not self.working._link.wait_ready(0.05) or self.working.passed()[1].name != "STREAM":
            if time.monotonic() > give_up:
                return f"not ready: {self.working._link._logged}"
        return ""

    def boot(self) -> str:
        """Of the daemon that this rank has entered last."""
        return self.working._link._entered

    def write(self, block: int, seed: int) -> str:
        """Random bytes in a block, there when this returns; their digest."""
        whole = self._read()
        rng = np.random.default_rng(seed)
        for view in self._views(whole):
            view[block] = rng.integers(0, 1 << 16, view[block].shape, dtype=np.uint16)
        with self.driver.current(self.context):
            self.driver.copy(self.start_address, whole.ctypes.data, self.nbytes, self.stream)
            self.driver.synchronize_stream(self.stream)
        return self.digest(block)

    def step(self, number: int, after: list[int], block: int, value: int, before: int, wait_s: float = 0.0) -> None:
        """Launch a step that fills a block behind `before` fills of other memory; wait for nothing."""
        time.sleep(wait_s)  # a rank whose host thread is behind
        own = [
            (tensor.data_ptr() + piece, one.stride, one.nbytes)
            for tensor, one in zip(self.tensors, self.lie.values(), strict=True)
            for piece in one.pieces
        ]
        with self.driver.current(self.context):
            for _ in range(before):
                self.driver.fill(self.busy, 0xEE, self.busy_bytes, self.stream)
            for start, stride, nbytes in own:
                self.driver.fill(start + block * stride, value, nbytes, self.stream)
        self.working.launched(number, (after[0], after[1]))

    def finish(self) -> float:
        """Wait for the stream; the seconds that took."""
        before = time.monotonic()
        with self.driver.current(self.context):
            self.driver.synchronize_stream(self.stream)
        return time.monotonic() - before

    def digest(self, block: int) -> str:
        """Of what vLLM sees in a block."""
        return hashlib.sha256(b"".join(view[block].tobytes() for view in self._views(self._read()))).hexdigest()

    def values(self, block: int) -> list[int]:
        """The different bytes in a block."""
        found = [np.unique(view[block].copy().view(np.uint8)) for view in self._views(self._read())]
        return sorted({int(byte) for part in found for byte in part})

    def leave(self) -> None:
        self.finish()
        self.working.close(10.0)

    def _read(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        whole = np.empty(self.nbytes, dtype=np.uint8)
        with self.driver.current(self.context):
            self.driver.copy(whole.ctypes.data, self.start_address, self.nbytes, self.stream)
            self.driver.synchronize_stream(self.stream)
        return whole

    def _views(self, whole: np.ndarray[Any, np.dtype[np.uint8]]) -> list[np.ndarray[Any, np.dtype[np.uint16]]]:
        views = []
        for tensor in self.tensors:
            flat = whole[tensor.data_ptr() - self.start_address :].view(np.uint16)
            strides = [stride * ITEM for stride in tensor.stride()]
            views.append(np.lib.stride_tricks.as_strided(flat, tuple(tensor.shape), strides))
        return views


if __name__ == "__main__":
    serve(VllmRank(int(sys.argv[1])))
