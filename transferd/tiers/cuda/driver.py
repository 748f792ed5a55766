"""The part of CUDA's driver API that the tier uses, in plain integers and bytes.

`Driver` is the seam: `bindings.BindingsDriver` implements it on a GPU, `tests.support.cuda` has a fake that moves bytes
and checks when each stream may touch which memory.

Handles (contexts, streams, events, modules, functions) and addresses are integers. By default a method acts on the
context that `current` has made current on the calling thread. `failure` turns CUDA's answer into the error that a call
raises: DeviceLost after an answer that CUDA calls sticky, since the context never works again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from transferd.errors import DeviceLost, TierError

OUT_OF_MEMORY = "out_of_device_memory"  # code of a TierError
NO_DRIVER = "no_cuda"  # code of a TierError: no driver, or no device at all
NOT_YET = "gpu_not_ready"  # code of a TierError: the machine's GPUs are still being set up

# Remedies for answers that explain little.
_REMEDIES = {
    "CUDA_ERROR_SYSTEM_NOT_READY": "the GPUs need NVIDIA's fabric manager: systemctl start nvidia-fabricmanager",
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
    f"CUDA_ERROR_{answer}"
    for answer in (
        *("DEINITIALIZED", "ECC_UNCORRECTABLE", "NVLINK_UNCORRECTABLE", "CONTAINED", "ILLEGAL_ADDRESS"),
        *("LAUNCH_TIMEOUT", "CONTEXT_IS_DESTROYED", "ASSERT", "HARDWARE_STACK_ERROR", "ILLEGAL_INSTRUCTION"),
        *("MISALIGNED_ADDRESS", "INVALID_ADDRESS_SPACE", "INVALID_PC", "LAUNCH_FAILED", "EXTERNAL_DEVICE"),
        *("TENSOR_MEMORY_LEAK", "MPS_CLIENT_TERMINATED", "UNKNOWN"),
    )
)
# Calls that answer CUDA_ERROR_UNKNOWN for what cannot be shared here (in some containers). The context works on.
_SHARING = frozenset({"cuIpcGetMemHandle", "cuIpcOpenMemHandle", "cuIpcGetEventHandle", "cuIpcOpenEventHandle"})


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """One GPU."""

    index: int
    name: str
    uuid: str  # 32 hex digits
    pci: str  # as in sysfs, 0000:17:00.0
    capability: tuple[int, int]  # (9, 0) for Hopper
    multiprocessors: int = 132  # their number
    words: bool = True  # streams can write and wait for 64-bit words
    same_address: bool = True  # the GPU reaches registered host memory at the host's own address
    exclusive: bool = False  # one process at a time may use the GPU (compute mode)


class RowCopy(NamedTuple):
    """Rows of equal length that begin a pitch apart, on the device and in host memory.

    Each side lies within one allocation or registration. A pitch is at least `width`, and at most MAX_PITCH.
    """

    device: int
    device_pitch: int
    host: int
    host_pitch: int
    width: int  # bytes of a row
    height: int  # how many rows
    outward: bool  # device → host


RowTable = npt.NDArray[np.uint64]
"""uint64 [n, 14], C-contiguous: a CUDA_MEMCPY3D_BATCH_OP each (batches.row_table)."""

MAX_PITCH = 2**31 - 1  # CU_DEVICE_ATTRIBUTE_MAX_PITCH of every device so far


class Driver(Protocol):
    """See the module docstring. Arrays are one-dimensional and C-contiguous."""

    @property
    def version(self) -> int:
        """The newest CUDA version that the driver supports: 13000 for 13.0."""
        ...

    @property
    def batches(self) -> bool:
        """True if `copy_batch` makes one call to the driver; False if it makes one call per copy."""
        ...

    @property
    def row_batches(self) -> bool:
        """True if the driver can take a table of row copies in one call."""
        ...

    # Devices and contexts. These calls need no current context.
    def device_count(self) -> int: ...
    def describe(self, index: int) -> DeviceInfo: ...
    def retain(self, index: int) -> int:
        """Return the device's primary context, which torch, paddle and the CUDA runtime of a process share.

        The driver counts references: call `release` once for each `retain`.
        """
        ...

    def release(self, index: int) -> None: ...
    def current(self, context: int) -> AbstractContextManager[None]:
        """Make `context` current on this thread within the `with` block."""
        ...

    def current_device(self) -> int | None:
        """The device of this thread's context; None if the thread has no context."""
        ...

    def allow_during_capture(self) -> None:
        """From now on, let this thread make any call while another thread captures a CUDA graph."""
        ...

    # memory
    def allocate(self, nbytes: int) -> int:
        """Allocate device memory that can be exported (cuMemAlloc), aligned to at least 256 bytes. Does not wait."""
        ...

    def free(self, address: int) -> None: ...
    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes of the device."""
        ...

    def address_range(self, address: int) -> tuple[int, int]:
        """Return (start, bytes) of the allocation that contains an address."""
        ...

    def register_host(self, address: int, nbytes: int) -> None:
        """Lock host pages and make them accessible to every device."""
        ...

    def unregister_host(self, address: int) -> None: ...

    # streams and events
    def create_stream(self, *, urgent: bool = False) -> int:
        """Create a stream that does not synchronize with the default one. urgent: its kernels are scheduled first."""
        ...

    def destroy_stream(self, stream: int) -> None: ...
    def synchronize_stream(self, stream: int) -> None:
        """Block until all work on the stream has finished. Releases the GIL."""
        ...

    def create_event(self, *, shared: bool = False) -> int:
        """Create an event without time stamps; waiting for it sleeps. shared: another process can open it."""
        ...

    def destroy_event(self, event: int) -> None: ...
    def record(self, event: int, stream: int) -> None: ...
    def wait(self, stream: int, event: int) -> None:
        """Make the stream wait for the event's latest record so far. An event never recorded counts as done."""
        ...

    def synchronize(self, event: int) -> None:
        """Block until the event's latest record is done. Sleeps, and releases the GIL."""
        ...

    def passed(self, event: int) -> bool:
        """Whether the event's latest record is done. Does not wait. An event never recorded counts as done."""
        ...

    def write_value(self, address: int, value: int, stream: int) -> None:
        """Write a 64-bit word when everything before it in the stream is done and visible.

        The word is in device memory, or in registered host memory (see DeviceInfo.same_address).
        """
        ...

    def wait_value(self, address: int, value: int, stream: int) -> None:
        """Make the stream wait until this 64-bit signed word is at least `value`."""
        ...

    # Work. Asynchronous unless a method says otherwise.
    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy between any two of device and host memory. With pageable host memory it may wait for the stream."""
        ...

    def copy_batch(
        self,
        targets: npt.NDArray[np.uint64],
        sources: npt.NDArray[np.uint64],
        sizes: npt.NDArray[np.uint64],
        stream: int,
    ) -> None:
        """Submit many copies, unordered among themselves. Host memory must be registered. Reads the arrays at once."""
        ...

    def copy_rows(self, rows: RowCopy, stream: int) -> None:
        """Copy rows, which the copy engine finds by itself. Host memory must be registered."""
        ...

    def copy_row_table(self, table: RowTable, stream: int, *, outward: bool, batch: bool) -> None:
        """Submit many copies of rows, unordered among themselves. outward: device → host. Reads the table at once.

        batch: in one call to the driver, which needs `row_batches`; otherwise one call per copy.
        """
        ...

    def fill(self, address: int, value: int, nbytes: int, stream: int) -> None: ...
    def compile(self, source: bytes, capability: tuple[int, int]) -> bytes:
        """Compile a kernel source into what `load` takes. Needs no current context."""
        ...

    def load(self, image: bytes) -> int: ...

    def unload(self, module: int) -> None: ...
    def function(self, module: int, name: str) -> int: ...
    def launch(self, function: int, grid: int, block: int, argument: ctypes.Structure, stream: int) -> None:
        """Launch a kernel with this struct as its only parameter. Reads the struct at once."""
        ...

    # other processes
    def exportable(self, address: int) -> bool:
        """Whether `export_memory` can work: the memory is from cudaMalloc and not from a pool or from cuMemCreate."""
        ...

    def export_memory(self, address: int) -> bytes:
        """Return the 64-byte IPC handle of an allocation. Raises TierError if it is not from cudaMalloc."""
        ...

    def open_memory(self, handle: bytes) -> int:
        """Map another process's allocation and return its start. A process cannot open its own handles."""
        ...

    def close_memory(self, address: int) -> None: ...
    def export_event(self, event: int) -> bytes: ...
    def open_event(self, handle: bytes) -> int:
        """Open another process's event. Destroy it with `destroy_event`."""
        ...


@contextmanager
def on_device(driver: Driver, device: int) -> Iterator[None]:
    """Within, this thread's calls act on the device's primary context."""
    context = driver.retain(device)
    try:
        with driver.current(context):
            yield
    finally:
        driver.release(device)


def failure(call: str, name: str, text: str = "") -> TierError:
    """The error for CUDA's answer `name` (a CUresult) to `call`."""
    sentence = f"{call} failed: {name}" + (f" ({text})" if text else "")
    if name in STICKY and not (name == "CUDA_ERROR_UNKNOWN" and call in _SHARING):
        return DeviceLost(sentence)
    if name in _REMEDIES:
        sentence += f": {_REMEDIES[name]}"
    code = {
        "CUDA_ERROR_OUT_OF_MEMORY": OUT_OF_MEMORY,
        "CUDA_ERROR_NO_DEVICE": NO_DRIVER,
        "CUDA_ERROR_SYSTEM_NOT_READY": NOT_YET,
    }.get(name)
    return TierError(sentence, code=code)


def find_device(driver: Driver, which: int | str) -> DeviceInfo:
    """The device with this index, or with this UUID. Raises TierError that says which devices there are."""
    count = driver.device_count()
    if count == 0:
        raise TierError("this process sees no GPU: check CUDA_VISIBLE_DEVICES", code=NO_DRIVER)
    if isinstance(which, str):
        return _with_uuid(driver, which, count)
    if not 0 <= which < count:
        seen = "1 GPU, device 0" if count == 1 else f"{count} GPUs, devices 0 … {count - 1}"
        raise TierError(f"there is no device {which}: this process sees {seen}", code=NO_DRIVER)
    return driver.describe(which)


def _with_uuid(driver: Driver, uuid: str, count: int) -> DeviceInfo:
    """uuid: as nvidia-smi writes it, or only its 32 hex digits."""
    wanted = uuid.removeprefix("GPU-").removeprefix("MIG-").replace("-", "").lower()
    for info in map(driver.describe, range(count)):
        if info.uuid == wanted:
            return info
    what = f"GPU {uuid} is not among the {count} that this process sees: check CUDA_VISIBLE_DEVICES"
    raise TierError(what, code=NO_DRIVER)
