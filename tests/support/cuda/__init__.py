"""A GPU that is not there: CUDA's driver as a program sees it, on plain memory, with somebody watching.

`gpu.FakeGpu` implements the tier's driver seam: streams run late and in any order that their events
allow, kernels are the real ones, compiled for the CPU, and whatever a GPU would answer with silence or
garbage (two streams on the same bytes, memory freed under a copy, work without a context) is written
down in `problems`. `abi.serve` puts the same GPU behind a libcuda.so.1, so that the real bindings can be
run over it.
"""
