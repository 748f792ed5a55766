"""How copies share a GPU with its engine: figures that depend on the kind of GPU and must be measured there.

Kernels of two processes take turns unless NVIDIA's MPS runs, so the best grid depends on MPS. With MPS, our kernel
should leave most multiprocessors to the engine. Without it, the engine waits for the end of our kernel anyway, so the
kernel should be quick.

`[cuda]` of the configuration sets each figure; `make gpu-check` measures with a busy neighbour and prints the best
ones. MEASURED has such results by the beginning of a GPU's name and whether MPS runs. It is empty: no GPU has been
measured yet. The defaults come from published figures, and each says which.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from transferd.config.sections import CudaSection
from transferd.tiers.cuda.driver import DeviceInfo

_MPS_DIRECTORY = "/tmp/nvidia-mps"


@dataclass(frozen=True, slots=True)
class Tuning:
    """The figures for one kind of GPU.

    grid: the most thread blocks of the kernel. long_run: the mean run length, in bytes, from which copies go straight.
    long_run_in: the same for copies into the device, if it is not 0. dma_most: the most bytes of one DMA. A copy engine
    has no priorities and never interrupts a DMA, so the engine's own small copies wait for its end. PCIe 5 moves 4 MiB
    in 80 us; starting a DMA costs half a microsecond (LMCache's figure).
    """

    grid: int
    long_run: int = 256 * 1024
    dma_most: int = 4 * 1024**2
    long_run_in: int = 0


DEFAULT = Tuning(grid=48)
MEASURED: dict[tuple[str, bool], Tuning] = {}


def tuning_for(info: DeviceInfo, *, mps: bool) -> Tuning:
    """The figures measured for this GPU, or the defaults."""
    for (name, beside_mps), tuning in MEASURED.items():
        if beside_mps == mps and info.name.startswith(name):
            return tuning
    # A third of an H100's multiprocessors is ten times faster than the bus; two blocks on each fill the GPU.
    return Tuning(grid=max(1, info.multiprocessors // 3) if mps else 2 * info.multiprocessors)


def tuned(info: DeviceInfo, settings: CudaSection, *, mps: bool) -> Tuning:
    """The configured figures, and for settings of 0 or "auto" those that fit this GPU."""
    chosen = {
        "grid": settings.grid,
        "long_run": settings.straight_from,
        "long_run_in": settings.loads_straight_from or settings.straight_from,
        "dma_most": settings.largest_dma,
    }
    return replace(tuning_for(info, mps=mps), **{name: int(value) for name, value in chosen.items() if value})


def mps_runs() -> bool:
    """Whether a CUDA process started here would be a client of MPS: whether the control daemon's pipe exists."""
    return (Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or _MPS_DIRECTORY) / "control").exists()
