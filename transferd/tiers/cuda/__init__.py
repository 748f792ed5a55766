"""The device tier on NVIDIA GPUs: gather and scatter kernels, DMA, and sharing by CUDA IPC.

Reading order: `tier` (a rank's memory), `copy_pipeline` (how a copy runs), `kernel` and
`../kernels/move_blocks.cu` (what runs on the device), `ipc` (what another process gets), `driver` (the CUDA
calls that all of it uses). Importing this package loads no CUDA; opening a tier does.
"""

from transferd.tiers.cuda.tier import CudaDeviceTier

__all__ = ["CudaDeviceTier"]
