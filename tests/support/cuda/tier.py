"""The CUDA tier on a fake GPU, in the form that configuration and the contract suites want."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.support.cuda.gpu import FakeGpu
from transferd.blocks.layout.base import BlockLayout
from transferd.config.sections import CudaSection
from transferd.errors import InvariantError
from transferd.runtime.threads import Threads
from transferd.tiers.cuda import CudaDeviceTier
from transferd.tiers.cuda.costs import CopyPath
from transferd.tiers.cuda.engine import DeviceArray, attach
from transferd.tiers.cuda.pinning import CudaPinning
from transferd.tiers.cuda.tier import SETTINGS
from transferd.tiers.cuda.tuning import SLOT_BYTES, Tuning
from transferd.tiers.pinned import Pinning


@functools.cache
def gpu_of_process() -> FakeGpu:
    """The machine that this process's configured tiers share: eight GPUs, so every rank finds its device."""
    return FakeGpu(devices=8)


class FakeCudaTier(CudaDeviceTier):
    """CudaDeviceTier on `gpu`, by default the process's. `cache.device = "tests.support.cuda.tier:FakeCudaTier"`.

    When the last of a GPU's tiers has closed, what went wrong on it meanwhile is an InvariantError.
    """

    def __init__(
        self,
        layout: BlockLayout,
        rank: int,
        device: int | str,
        threads: Threads,
        *,
        gpu: FakeGpu | None = None,
        copy_path: CopyPath | None = None,
        tuning: Tuning | None = None,
        slot_bytes: int = SLOT_BYTES,
        settings: CudaSection = SETTINGS,
    ) -> None:
        self.gpu = gpu if gpu is not None else gpu_of_process()
        super().__init__(
            layout,
            rank,
            device,
            threads,
            driver=self.gpu,
            copy_path=copy_path,
            tuning=tuning,
            slot_bytes=slot_bytes,
            settings=settings,
        )

    @staticmethod
    def pinning(device: int | str) -> Pinning:
        return CudaPinning(device, gpu_of_process())

    async def close(self) -> None:
        await super().close()
        wrong = self.gpu.wrong()
        if wrong:
            raise InvariantError("\n".join(wrong))


class _OnFake:
    """What numpy needs to see a DeviceArray of a fake GPU, whose memory this process can read."""

    def __init__(self, array: DeviceArray) -> None:
        self.array = array  # keeps the mapping

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self.array.__cuda_array_interface__


def as_numpy(array: DeviceArray) -> npt.NDArray[Any]:
    """The same memory as a numpy array, which keeps it mapped."""
    return np.asarray(_OnFake(array))


def attach_arrays(data: dict[str, Any]) -> dict[str, list[npt.NDArray[Any]]]:
    """What an engine in another process sees of a fake GPU's cache, as numpy arrays."""
    caches = attach(data, FakeGpu(devices=8)).caches
    return {plane: [as_numpy(array) for array in arrays] for plane, arrays in caches.items()}
