"""How copies share a GPU with its engine: figures that depend on the kind of GPU and must be measured there.

Kernels of two processes take turns unless NVIDIA's MPS runs, so the figures depend on MPS. With MPS, our kernel should
leave most multiprocessors to the engine. Without it, the engine waits for the end of our kernel anyway, so the kernel
should be quick.

`make gpu-check` measures with a busy neighbour and prints its figures as an entry of MEASURED. GPUs of one compute
capability have one chip and one bus, whatever their names: an H800 is an H100 with slower links between GPUs. The
defaults come from an H100 and from published figures, with the source beside each.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from transferd.tiers.cuda.costs import Costs
from transferd.tiers.cuda.driver import DeviceInfo

_MPS_DIRECTORY = "/tmp/nvidia-mps"


@dataclass(frozen=True, slots=True)
class Tuning:
    """The figures for one kind of GPU.

    grid: the most thread blocks of the kernel.
    dma_most: the most bytes of one DMA. A copy engine has no priorities and never interrupts a DMA, so the engine's own
        small copies wait for its end. PCIe 5 moves 4 MiB in 80 us; starting a DMA costs half a microsecond (LMCache's
        figure).
    slots: of staging on the device, for each direction.
    host_words: whether tasks wait for timelines in host memory (host_words.py). True once the device has noticed those
        five times sooner than words of its own (gpu-check: tasks behind a step of 10 ms).
    costs: what each way of a copy costs (costs.py).
    """

    grid: int
    dma_most: int = 4 * 1024**2
    slots: int = 2
    host_words: bool = False
    costs: Costs = field(default_factory=Costs)


# Bytes of a slot. With slots of 8 MiB a pipeline holds Python's lock for twice as long (benchmarks/gpu_submission.py).
# Without MPS, kernels get a turn every one to two milliseconds, so the slots must hold enough work to last that long.
SLOT_BYTES = 32 * 1024**2


DEFAULT = Tuning(grid=48)
HOPPER, AMPERE = (9, 0), 8  # a compute capability, and the major number of one
# Under MPS, an H100 keeps nine tenths of its steps beside our kernels (docs/adr/0100).
SHARED = Costs(gather=42e9, kernel_loss=0.13)
PCIE_4 = Costs(bus=21e9, gather=19e9)  # half of PCIe 5; not measured
PCIE_4_SHARED = Costs(bus=21e9, gather=19.5e9, kernel_loss=0.13)  # not measured
# By compute capability, and whether MPS runs. An H100's figures without MPS are the defaults of Costs.
MEASURED: dict[tuple[tuple[int, int], bool], Tuning] = {
    (HOPPER, False): Tuning(grid=264),
}


def tuning_for(info: DeviceInfo, *, mps: bool) -> Tuning:
    """The figures measured for this kind of GPU, or the defaults."""
    if (measured := MEASURED.get((info.capability, mps))) is not None:
        return measured
    # A third of an H100's multiprocessors is ten times faster than the bus; two blocks on each fill the GPU.
    grid = max(1, info.multiprocessors // 3) if mps else 2 * info.multiprocessors
    if info.capability[0] <= AMPERE:
        return Tuning(grid, costs=PCIE_4_SHARED if mps else PCIE_4)
    return Tuning(grid, costs=SHARED if mps else Costs())


def mps_runs() -> bool:
    """Whether a CUDA process started here would be a client of MPS: whether the control daemon's pipe exists."""
    return (Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or _MPS_DIRECTORY) / "control").exists()
