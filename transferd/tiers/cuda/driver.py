"""What the tier needs of CUDA: some thirty calls of the driver API, in plain integers and bytes.

`Driver` is the seam. `bindings.BindingsDriver` is the real one; `tests.support.cuda` has a double that moves
bytes and keeps account of who may touch what when. Everything above this file knows CUDA's rules
(ordering, lifetimes, what is asynchronous) and nothing of its bindings; everything below knows calling
conventions and no rule.

Handles (contexts, streams, events, modules, functions) and addresses are integers. Every call acts on
the context that `current` made so on this thread, except those that say otherwise.

Errors: each call raises what `failure` makes of CUDA's answer. After some answers a context never works
again (CUDA calls them sticky): those are DeviceLost, everything else is a TierError.
"""

from __future__ import annotations

import ctypes
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from transferd.errors import DeviceLost, TierError

OUT_OF_MEMORY = "out_of_device_memory"  # code of a TierError
NO_DRIVER = "no_cuda"  # code of a TierError: no driver, or no device at all
MAPPED_ALREADY = "already_mapped"  # code of a TierError
NOT_YET = "gpu_not_ready"  # code of a TierError: the machine's GPUs are still being set up

# What to do about answers that say little by themselves.
_REMEDIES = {
    "CUDA_ERROR_SYSTEM_NOT_READY": "the GPUs wait for NVIDIA's fabric manager: systemctl start nvidia-fabricmanager",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "the driver's libraries and kernel module differ: reboot after its upgrade",
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": "remove the cuda-compat package, or take a driver for this GPU",
    "CUDA_ERROR_DEVICE_UNAVAILABLE": "another process has the GPU in exclusive mode: nvidia-smi -c DEFAULT, or run MPS",
    "CUDA_ERROR_NO_DEVICE": "check CUDA_VISIBLE_DEVICES and the device nodes (nvidia-smi -L)",
    "CUDA_ERROR_INVALID_IMAGE": "NVRTC is newer than the driver",
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "NVRTC is newer than the driver",
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": "NVRTC is newer than the driver",
}

# Answers after which the context is unusable (CUDA driver API, CUresult: "must be terminated and relaunched").
STICKY = frozenset(
    {
        "CUDA_ERROR_DEINITIALIZED",
        "CUDA_ERROR_ECC_UNCORRECTABLE",
        "CUDA_ERROR_NVLINK_UNCORRECTABLE",
        "CUDA_ERROR_CONTAINED",
        "CUDA_ERROR_ILLEGAL_ADDRESS",
        "CUDA_ERROR_LAUNCH_TIMEOUT",
        "CUDA_ERROR_CONTEXT_IS_DESTROYED",
        "CUDA_ERROR_ASSERT",
        "CUDA_ERROR_HARDWARE_STACK_ERROR",
        "CUDA_ERROR_ILLEGAL_INSTRUCTION",
        "CUDA_ERROR_MISALIGNED_ADDRESS",
        "CUDA_ERROR_INVALID_ADDRESS_SPACE",
        "CUDA_ERROR_INVALID_PC",
        "CUDA_ERROR_LAUNCH_FAILED",
        "CUDA_ERROR_EXTERNAL_DEVICE",
        "CUDA_ERROR_TENSOR_MEMORY_LEAK",
        "CUDA_ERROR_MPS_CLIENT_TERMINATED",
        "CUDA_ERROR_UNKNOWN",
    }
)


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """One GPU. uuid: 32 hex digits. pci: as in sysfs, 0000:17:00.0. capability: (9, 0) for Hopper.

    multiprocessors: how many it has. words: streams can write and wait for 64-bit words. same_address: it reaches
    registered host memory at the host's own address. exclusive: one process at a time may use it (compute mode).
    """

    index: int
    name: str
    uuid: str
    pci: str
    capability: tuple[int, int]
    multiprocessors: int = 132
    words: bool = True
    same_address: bool = True
    exclusive: bool = False


class Driver(Protocol):
    """See the module. Arrays are one-dimensional and C-contiguous."""

    @property
    def version(self) -> int:
        """Of the CUDA that the driver supports: 13000 for 13.0."""
        ...

    @property
    def batches(self) -> bool:
        """copy_batch is one call to the driver, and not one for each copy."""
        ...

    # devices and contexts; these need no current context
    def device_count(self) -> int: ...
    def describe(self, index: int) -> DeviceInfo: ...
    def retain(self, index: int) -> int:
        """The device's primary context, which torch, paddle and the CUDA runtime of a process share. Counted."""
        ...

    def release(self, index: int) -> None: ...
    def current(self, context: int) -> AbstractContextManager[None]:
        """Make `context` this thread's for the duration."""
        ...

    # memory
    def allocate(self, nbytes: int) -> int:
        """Device memory that can be exported (cuMemAlloc, at least 256-byte aligned). Waits for nothing."""
        ...

    def free(self, address: int) -> None: ...
    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes of the device."""
        ...

    def address_range(self, address: int) -> tuple[int, int]:
        """(start, bytes) of the allocation that an address lies in."""
        ...

    def register_host(self, address: int, nbytes: int) -> None:
        """Lock host pages and let every device reach them at the same address."""
        ...

    def unregister_host(self, address: int) -> None: ...

    # streams and events
    def create_stream(self, *, urgent: bool = False) -> int:
        """A stream that does not wait for the default one. urgent: its kernels are placed before others."""
        ...

    def destroy_stream(self, stream: int) -> None: ...
    def synchronize_stream(self, stream: int) -> None:
        """Wait until everything in the stream has ended. Releases the GIL."""
        ...

    def create_event(self, *, shared: bool = False) -> int:
        """An event without a time stamp; waiting for it sleeps. shared: another process can open it."""
        ...

    def destroy_event(self, event: int) -> None: ...
    def record(self, event: int, stream: int) -> None: ...
    def wait(self, stream: int, event: int) -> None:
        """The stream goes on when what was recorded last, up to now, has happened. An unrecorded event has."""
        ...

    def synchronize(self, event: int) -> None:
        """Wait in this thread, asleep and without the GIL, for what was recorded last."""
        ...

    def passed(self, event: int) -> bool:
        """Whether what was recorded last has happened. Does not wait. An unrecorded event has."""
        ...

    def write_value(self, address: int, value: int, stream: int) -> None:
        """Write a 64-bit word of device memory when everything before it in the stream is done and visible."""
        ...

    def wait_value(self, address: int, value: int, stream: int) -> None:
        """The stream goes on when this 64-bit word, signed, is at least `value`."""
        ...

    # work; asynchronous unless said otherwise
    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Between any two of device and host memory. With pageable host memory it may wait for the stream."""
        ...

    def copy_batch(
        self,
        targets: npt.NDArray[np.uint64],
        sources: npt.NDArray[np.uint64],
        sizes: npt.NDArray[np.uint64],
        stream: int,
    ) -> None:
        """Many copies, in no order among themselves. Host memory must be registered. The arrays are read at once."""
        ...

    def fill(self, address: int, value: int, nbytes: int, stream: int) -> None: ...
    def compile(self, source: bytes, capability: tuple[int, int]) -> bytes:
        """What `load` takes, for devices of this compute capability. Needs no current context."""
        ...

    def load(self, image: bytes) -> int: ...

    def unload(self, module: int) -> None: ...
    def function(self, module: int, name: str) -> int: ...
    def launch(self, function: int, grid: int, block: int, argument: ctypes.Structure, stream: int) -> None:
        """Run a kernel whose one parameter is a struct; it is read at once."""
        ...

    # other processes
    def exportable(self, address: int) -> bool:
        """Whether `export_memory` can work: the memory is from cudaMalloc and not from a pool or from cuMemCreate."""
        ...

    def export_memory(self, address: int) -> bytes:
        """64 bytes that name the allocation. TierError where it did not come from cudaMalloc."""
        ...

    def open_memory(self, handle: bytes) -> int:
        """Map another process's allocation; its start. The exporter itself cannot. Errors as for a bad handle."""
        ...

    def close_memory(self, address: int) -> None: ...
    def export_event(self, event: int) -> bytes: ...
    def open_event(self, handle: bytes) -> int:
        """Destroyed by destroy_event, like one's own."""
        ...


def failure(call: str, name: str, text: str = "") -> TierError:
    """The error for CUDA's answer `name` (a CUresult) to `call`."""
    sentence = f"{call} failed: {name}" + (f" ({text})" if text else "")
    if name in STICKY:
        return DeviceLost(sentence)
    if name in _REMEDIES:
        sentence += f": {_REMEDIES[name]}"
    code = {
        "CUDA_ERROR_OUT_OF_MEMORY": OUT_OF_MEMORY,
        "CUDA_ERROR_NO_DEVICE": NO_DRIVER,
        "CUDA_ERROR_ALREADY_MAPPED": MAPPED_ALREADY,
        "CUDA_ERROR_SYSTEM_NOT_READY": NOT_YET,
    }.get(name)
    return TierError(sentence, code=code)
