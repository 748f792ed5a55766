"""How copies share a GPU with its engine: figures that depend on the kind of GPU and must be measured there.

Kernels of two processes take turns unless NVIDIA's MPS runs, so the best grid depends on MPS. With MPS, our kernel
should leave most multiprocessors to the engine. Without it, the engine waits for the end of our kernel anyway, so the
kernel should be quick.

`make gpu-check` measures with a busy neighbour and prints the best figures as an entry of MEASURED. The key of an entry
is the beginning of a GPU's name, and whether MPS runs. The defaults come from an H100 and from published figures, with
the source beside each.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from transferd.tiers.cuda.driver import DeviceInfo

_MPS_DIRECTORY = "/tmp/nvidia-mps"


@dataclass(frozen=True, slots=True)
class Tuning:
    """The figures for one kind of GPU.

    grid: the most thread blocks of the kernel.
    long_run: the mean length of a copy's runs, in bytes, from which it goes straight.
    long_run_in: the same for copies into the device; 0 takes long_run.
    long_row: the bytes of a block's shortest segment from which it is copied in rows, where it can be (rows.py). On an
        H100, rows of 8 KiB are as fast as gathered blocks beside a busy neighbour, with and without MPS, and without it
        the neighbour keeps 0.8 to 0.9 of its steps instead of 0.4. Rows of 256 bytes, as scales have them, take 4 us
        each.
    dma_most: the most bytes of one DMA. A copy engine has no priorities and never interrupts a DMA, so the engine's own
        small copies wait for its end. PCIe 5 moves 4 MiB in 80 us; starting a DMA costs half a microsecond (LMCache's
        figure).
    slots: of staging on the device, for each direction.
    """

    grid: int
    long_run: int = 256 * 1024
    long_run_in: int = 0
    dma_most: int = 4 * 1024**2
    slots: int = 2
    long_row: int = 8 * 1024


# Bytes of a slot. With slots of 8 MiB a pipeline holds Python's lock for twice as long (benchmarks/gpu_submission.py).
# Without MPS, kernels get a turn every one to two milliseconds, so the slots must hold enough work to last that long.
SLOT_BYTES = 32 * 1024**2


DEFAULT = Tuning(grid=48)
# Beside a busy neighbour (docs/adr/0100). Straight copies of 32 KiB a piece are a third slower than gathered ones, and
# leave the neighbour 0.9 of its steps instead of 0.4. Under MPS, the defaults leave it 0.9.
MEASURED: dict[tuple[str, bool], Tuning] = {
    ("NVIDIA H100 80GB HBM3", False): Tuning(grid=264, long_run=32 * 1024),
}


def tuning_for(info: DeviceInfo, *, mps: bool) -> Tuning:
    """The figures measured for this GPU, or the defaults."""
    for (name, beside_mps), tuning in MEASURED.items():
        if beside_mps == mps and info.name.startswith(name):
            return tuning
    # A third of an H100's multiprocessors is ten times faster than the bus; two blocks on each fill the GPU.
    return Tuning(grid=max(1, info.multiprocessors // 3) if mps else 2 * info.multiprocessors)


def mps_runs() -> bool:
    """Whether a CUDA process started here would be a client of MPS: whether the control daemon's pipe exists."""
    return (Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or _MPS_DIRECTORY) / "control").exists()
