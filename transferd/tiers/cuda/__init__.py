"""The device tier on NVIDIA GPUs. Importing this package loads no CUDA; opening a tier does."""
