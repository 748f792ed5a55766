"""TransferdConnector under vLLM's own scheduler, with KV memory on a simulated GPU and a real daemon.

A step is launched and returns: its writes lie on the rank's stream until something waits for them, which is as late as
it can be, when the next step begins. So nothing but the timeline keeps the daemon from copying too early.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.machine.with_vllm.dry import LAYERS, PAGE, SHAPE, STALE, DryEngine, DryRank, prompts
from tests.machine.with_vllm.test_scheduler import ROOMY, computes_nothing_twice, preempts_and_aborts
from tests.machine.with_vllm.test_trace import conversations
from tests.support.cuda.gpu import FakeGpu
from tests.support.cuda.shim import compiler
from tests.support.cuda.tensor import GpuTensor, layer_views
from tests.support.cuda.tier import as_numpy
from transferd.adapters.common.entry import Order
from transferd.adapters.common.gpu import GpuMemory
from transferd.adapters.vllm import working
from transferd.adapters.vllm.scheduling import Scheduling
from transferd.adapters.vllm.settings import VLLM
from transferd.adapters.vllm.working import INSTEAD
from transferd.client.launch import running
from transferd.tiers.cuda.engine import DeviceArray

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(compiler() is None, reason="there is no C compiler to run kernels on the CPU with"),
]

DEVICE = "tests.support.cuda.tier:FakeCudaTier"


class GpuRank(DryRank):
    """A worker whose tensors are on a GPU of its own, and whose steps are computed late."""

    def register(self, blocks: int) -> None:
        self.gpu = FakeGpu(seed=self.rank)
        self.context = self.gpu.retain(0)
        with self.gpu.current(self.context):
            self.address = self.gpu.allocate(len(LAYERS) * blocks * PAGE)
            self.stream = self.gpu.create_stream()
        self.bytes = as_numpy(DeviceArray(self.address, (len(LAYERS), blocks, PAGE), "uint8", 0, None))
        self.bytes[:] = STALE
        self.late: dict[int, Any] = {}  # blocks that the stream has yet to write
        views = layer_views("LBHNC", (len(LAYERS), blocks, *SHAPE), 4)
        tensors = [GpuTensor(self.address, *view, 4) for view in views]
        for tensor in tensors:
            tensor.device.owner = self
        self.connector.register_kv_caches(dict(zip(LAYERS, tensors, strict=True)))

    def settle(self) -> None:
        self.late.clear()
        with self.gpu.current(self.context):
            self.gpu.synchronize_stream(self.stream)
        assert self.gpu.wrong() == []

    def holds(self, block: int, content: Any) -> bool:
        return np.array_equal(self.late.get(block, self.bytes[:, block]), content)

    def put(self, block: int, content: Any) -> None:
        pages = np.array(np.broadcast_to(content, (len(LAYERS), PAGE)), dtype=np.uint8)
        self.late[block] = pages
        with self.gpu.current(self.context):
            for layer, page in enumerate(pages):
                place = self.bytes[layer, block].ctypes.data
                self.gpu.copy(place, page.ctypes.data, PAGE, self.stream)


@pytest.fixture
def endpoint(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Of a daemon whose registered engines may use the simulated GPU, as the workers here do."""

    def memory(rank: int, tensors: Any, layers: Any, **_: Any) -> GpuMemory:
        owner = tensors[0].device.owner
        ranks = owner.connector._vllm_config.parallel_config.tensor_parallel_size
        return GpuMemory(
            rank, tensors, layers, program=VLLM, instead=INSTEAD, gather=lambda own: [own] * ranks,
            stream=lambda: owner.stream, kind=DEVICE, driver=owner.gpu,
        )  # fmt: skip

    monkeypatch.setattr(working, "GpuMemory", memory)
    sections = {"engines": {"devices": [DEVICE]}, "host": {"staging": "4MiB"}, "storage": {"backend": "file"}}
    with running(sections, place) as daemon:
        yield daemon.endpoint


def engine(place: Path, endpoint: str, **more: Any) -> DryEngine:
    return DryEngine(place, "connector", rank_class=GpuRank, endpoint=endpoint, **{"blocks": ROOMY, **more})


@pytest.mark.parametrize("ahead", [False, True], ids=["in step", "ahead"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_restarted_engine_computes_nothing_twice(place: Path, endpoint: str, ranks: int, ahead: bool) -> None:
    computes_nothing_twice(lambda: engine(place, endpoint, ranks=ranks, ahead=ahead))


def test_without_the_timeline_bytes_are_wrong(place: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests here see what they are for. The stream gets nowhere until all that it filled has been saved."""
    ready = Scheduling.ready
    monkeypatch.setattr(Scheduling, "ready", lambda it, word, _order: ready(it, word, Order.HOST))
    asked = prompts(1, 200, 300, 170)
    with engine(place, endpoint) as only:
        with monkeypatch.context() as late:
            late.setattr(GpuRank, "settle", lambda _: None)
            only.run(asked, answer=1)
        only.forget()
        with pytest.raises(AssertionError, match="wrong bytes in block"):
            only.run(asked)


@pytest.mark.parametrize("ahead", [False, True], ids=["in step", "ahead"])
def test_preempted_and_aborted_requests_leave_no_wrong_byte(place: Path, endpoint: str, ahead: bool) -> None:
    draw = random.Random(14)
    asked = prompts(14, *[250] * 8)
    with engine(place, endpoint, ranks=2, blocks=36, ahead=ahead) as tight:
        preempts_and_aborts(tight, draw, asked)
        tight.run(asked)


def test_conversations_are_right_to_the_byte(place: Path, endpoint: str) -> None:
    """Through a small KV cache, so that most of what a request finds has been loaded."""
    with engine(place, endpoint, ranks=2, blocks=110, together=3, ahead=True) as small:
        small.run(conversations()[:40])
