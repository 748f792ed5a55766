"""The CUDA tier on a fake GPU, in the form that configuration and the contract suites want."""

from __future__ import annotations

import functools

from transferd.errors import InvariantError
from transferd.layout.base import BlockLayout
from transferd.offload import Offload
from transferd.testing.cuda.gpu import FakeGpu
from transferd.tiers.cuda import CudaDeviceTier
from transferd.tiers.cuda.pinning import CudaPinning
from transferd.tiers.cuda.tier import SLOT_BYTES
from transferd.tiers.pinning import Pinning


@functools.cache
def gpu_of_process() -> FakeGpu:
    """The machine that this process's configured tiers share: eight GPUs, so every rank finds its device."""
    return FakeGpu(devices=8)


class FakeCudaTier(CudaDeviceTier):
    """CudaDeviceTier on `gpu`, by default the process's. `cache.device = "transferd.testing.cuda.tier:FakeCudaTier"`.

    When the last of a GPU's tiers has closed, what went wrong on it meanwhile is an InvariantError.
    """

    def __init__(
        self,
        layout: BlockLayout,
        rank: int,
        device: int,
        offload: Offload,
        *,
        gpu: FakeGpu | None = None,
        way: str = "",
        slot_bytes: int = SLOT_BYTES,
    ) -> None:
        self.gpu = gpu if gpu is not None else gpu_of_process()
        super().__init__(layout, rank, device, offload, driver=self.gpu, way=way, slot_bytes=slot_bytes)

    @staticmethod
    def pinning(device: int) -> Pinning:
        return CudaPinning(device, gpu_of_process())

    async def close(self) -> None:
        await super().close()
        wrong = self.gpu.wrong()
        if wrong:
            raise InvariantError("\n".join(wrong))
