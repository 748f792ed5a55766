"""The driver API through NVIDIA's own bindings, cuda-bindings 12.9.1 or newer.

Every call of the bindings releases the GIL and returns (CUresult, value, …), which this module translates.
Older bindings hold the GIL: one thread that waits for an event would stop the daemon, so they are refused.
Structs are read and written through their addresses: the bindings have renamed attributes (the `reserved`
bytes of an IPC handle came and went between 12.9 and 13.5), but the memory layout has stayed the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import structlog

from transferd.errors import TierError
from transferd.tiers.cuda.batches import BatchCopy, RowBatch, find_batch_copy, find_row_batch, find_rows, row_table
from transferd.tiers.cuda.driver import NO_DRIVER, NOT_YET, DeviceInfo, Driver, RowCopy, RowTable, failure

log = structlog.get_logger(__name__)

_IPC_HANDLE_BYTES = 64
_WRITE_DEFAULT = 0  # CU_STREAM_WRITE_VALUE_DEFAULT: earlier writes of the stream become visible before the word
_WAIT_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ
FABRIC_ATTEMPTS = 60  # a fabric manager takes about a minute after the machine has booted
FABRIC_WAIT_S = 2.0
# The driver reads these as it starts. Waits and copies of several ranks share no queue; a kernel is loaded with its
# module and not at its first launch, which may come beside another rank's wait (kernel.py).
_ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER"}
_RELEASES = {12: "R535", 13: "R580"}  # the oldest drivers for the packages of a CUDA version
_OLDEST = (12, 9, 1)  # cuda-bindings that release the GIL (its release notes)


@functools.cache
def open_driver() -> Driver:
    """Return this process's driver. Raises TierError, code `no_cuda`, with one line that names what is missing."""
    try:
        from cuda.bindings import __version__ as release
        from cuda.bindings import driver as api
    except ImportError as error:
        raise TierError("cuda-bindings is not installed: pip install 'transferd[cuda]'", code=NO_DRIVER) from error
    check_release(release)
    _initialise(api)
    return BindingsDriver(api)


def open_daemons_driver() -> Driver:
    """`open_driver` for the daemon's process; sets its environment. Engines' processes keep theirs as it is."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    return open_driver()


def _initialise(api: Any, wait: Callable[[float], None] = time.sleep) -> None:
    """Call cuInit, and retry for a while if the machine's fabric manager is still starting. Raises TierError."""
    for attempt in range(FABRIC_ATTEMPTS):
        try:
            (result,) = api.cuInit(0)
        except Exception as error:  # the bindings load libcuda at the first call, and have changed how that fails
            sentence = " ".join(str(error).split())
            raise TierError(f"there is no NVIDIA driver: {sentence}", code=NO_DRIVER) from error
        if result == api.CUresult.CUDA_SUCCESS:
            return
        problem = failure("cuInit", result.name, "no GPU can be used by this process")
        if problem.reason != NOT_YET:
            raise problem
        if attempt == 0:
            log.warning("waiting for the GPUs to be set up", problem=str(problem))
        wait(FABRIC_WAIT_S)
    raise problem


def check_fit(driver: int, nvrtc: tuple[int, int] | None, bindings: str) -> None:
    """Raise TierError if these packages are for a newer CUDA than this driver, and say which to install.

    driver: as Driver.version.
    nvrtc: its version; None if there is none.
    bindings: the version of cuda-bindings.

    Within a major version each driver loads machine code of each NVRTC (CUDA's minor version compatibility). For PTX
    see `compile_kernel`.
    """
    major, minor = driver // 1000, driver % 1000 // 10
    has = f"the driver supports CUDA {major}.{minor}"
    if major < min(_RELEASES):
        raise TierError(f"{has}: install a driver of {_RELEASES[min(_RELEASES)]} or newer", code=NO_DRIVER)
    what, wanted = f"cuda-bindings {bindings}", int(bindings.partition(".")[0])
    if nvrtc is not None:
        what, wanted = f"NVRTC {nvrtc[0]}.{nvrtc[1]}", nvrtc[0]
    if wanted > major:
        release = f"of {_RELEASES[wanted]} or newer" if wanted in _RELEASES else f"for CUDA {wanted}"
        remedy = f"pip install 'transferd[cuda{major}]', or install a driver {release}"
        raise TierError(f"{has}, but {what} is for CUDA {wanted}: {remedy}", code=NO_DRIVER)


def check_packages(driver: Driver) -> None:
    """`check_fit` for what is installed."""
    check_fit(driver.version, nvrtc_version(), bindings_version())


def bindings_version() -> str:
    """The version of cuda-bindings, which is installed."""
    from cuda.bindings import __version__ as release

    return str(release)


def check_release(version: str) -> None:
    """Raise TierError for a release of cuda-bindings that cannot be used."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    if numbers < _OLDEST:
        oldest = ".".join(str(number) for number in _OLDEST)
        problem = f"cuda-bindings {version} stops every other thread while it waits; {oldest} or newer is needed"
        raise TierError(problem, code=NO_DRIVER)


class BindingsDriver:
    """Driver over the module cuda.bindings.driver. Keeps no state: the caller owns whatever it creates."""

    def __init__(self, api: Any) -> None:
        self._api = api
        self.version = int(self._call("cuDriverGetVersion"))
        self._batch: BatchCopy | None = find_batch_copy(api, self.version)
        self._row_batch = find_row_batch(api, self.version)
        self._rows = find_rows(api, self.version)
        hot = ("cuEventRecord", "cuStreamWaitEvent", "cuMemcpyAsync", "cuLaunchKernel")
        self._record, self._wait, self._copy, self._launch = (getattr(api, name, None) for name in hot)

    @property
    def batches(self) -> bool:
        return self._batch is not None

    @property
    def row_batches(self) -> bool:
        return self._row_batch is not None

    def _values(self, name: str, *arguments: Any) -> list[Any]:
        """Make a call and return its values after CUDA_SUCCESS. Raises what `failure` makes of any other result."""
        try:
            result, *rest = getattr(self._api, name)(*arguments)
        except (RuntimeError, ValueError) as error:  # a function the driver lacks; an answer newer than the bindings
            raise TierError(f"{name} failed: {' '.join(str(error).split())}") from error
        if result != self._api.CUresult.CUDA_SUCCESS:
            raise self._failure(name, result)
        return list(rest)

    def _call(self, name: str, *arguments: Any) -> Any:
        """Make a call and return its first value, or None."""
        values = self._values(name, *arguments)
        return values[0] if values else None

    def _do(self, name: str, function: Any, *arguments: Any) -> None:
        """Like `_call`, for calls that each chunk makes several times: it looks nothing up and returns nothing."""
        try:
            (result,) = function(*arguments)
        except (RuntimeError, ValueError) as error:
            raise TierError(f"{name} failed: {' '.join(str(error).split())}") from error
        if result:
            raise self._failure(name, result)

    def _failure(self, name: str, result: Any) -> TierError:
        _, text = self._api.cuGetErrorString(result)
        return failure(name, result.name, text.decode(errors="replace") if text else "")

    # --- devices and contexts -----------------------------------------------------------------------

    def device_count(self) -> int:
        return int(self._call("cuDeviceGetCount"))

    def describe(self, index: int) -> DeviceInfo:
        device = self._call("cuDeviceGet", index)
        attribute = self._api.CUdevice_attribute
        major, minor, multiprocessors, words, same_address, mode = (
            int(self._call("cuDeviceGetAttribute", which, device))
            for which in (
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
                attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
                attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS,
                attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM,
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_MODE,
            )
        )
        # Version 2 distinguishes the slices of a GPU (MIG); newer bindings have it under the plain name.
        uuid = "cuDeviceGetUuid_v2" if hasattr(self._api, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
        return DeviceInfo(
            index=index,
            name=_text(self._call("cuDeviceGetName", 128, device)),
            uuid=_content(self._call(uuid, device), 16).hex(),
            pci=_text(self._call("cuDeviceGetPCIBusId", 32, device)).lower(),
            capability=(major, minor),
            multiprocessors=multiprocessors,
            words=bool(words),
            same_address=bool(same_address),
            exclusive=mode == int(self._api.CUcomputemode.CU_COMPUTEMODE_EXCLUSIVE_PROCESS),
        )

    def retain(self, index: int) -> int:
        return int(self._call("cuDevicePrimaryCtxRetain", self._call("cuDeviceGet", index)))

    def release(self, index: int) -> None:
        self._call("cuDevicePrimaryCtxRelease", self._call("cuDeviceGet", index))

    @contextlib.contextmanager
    def current(self, context: int) -> Iterator[None]:
        self._call("cuCtxPushCurrent", context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent")

    def current_device(self) -> int | None:
        result, device = self._api.cuCtxGetDevice()
        return int(device) if result == self._api.CUresult.CUDA_SUCCESS else None

    def allow_during_capture(self) -> None:
        self._call("cuThreadExchangeStreamCaptureMode", self._api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)

    # --- memory -------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> int:
        return int(self._call("cuMemAlloc", nbytes))

    def free(self, address: int) -> None:
        self._call("cuMemFree", address)

    def memory_info(self) -> tuple[int, int]:
        free, total = self._values("cuMemGetInfo")
        return int(free), int(total)

    def address_range(self, address: int) -> tuple[int, int]:
        start, nbytes = self._values("cuMemGetAddressRange", address)
        return int(start), int(nbytes)

    def register_host(self, address: int, nbytes: int) -> None:
        flags = self._api.CU_MEMHOSTREGISTER_PORTABLE | self._api.CU_MEMHOSTREGISTER_DEVICEMAP
        self._call("cuMemHostRegister", address, nbytes, flags)

    def unregister_host(self, address: int) -> None:
        self._call("cuMemHostUnregister", address)

    # --- streams and events -------------------------------------------------------------------------

    def create_stream(self, *, urgent: bool = False) -> int:
        flags = self._api.CUstream_flags.CU_STREAM_NON_BLOCKING
        if not urgent:
            return int(self._call("cuStreamCreate", flags))
        _, greatest = self._values("cuCtxGetStreamPriorityRange")
        return int(self._call("cuStreamCreateWithPriority", flags, greatest))

    def destroy_stream(self, stream: int) -> None:
        self._call("cuStreamDestroy", stream)

    def synchronize_stream(self, stream: int) -> None:
        self._call("cuStreamSynchronize", stream)

    def create_event(self, *, shared: bool = False) -> int:
        kinds = self._api.CUevent_flags
        flags = kinds.CU_EVENT_BLOCKING_SYNC | kinds.CU_EVENT_DISABLE_TIMING
        if shared:
            flags |= kinds.CU_EVENT_INTERPROCESS
        return int(self._call("cuEventCreate", int(flags)))

    def destroy_event(self, event: int) -> None:
        self._call("cuEventDestroy", event)

    def record(self, event: int, stream: int) -> None:
        self._do("cuEventRecord", self._record, event, stream)

    def wait(self, stream: int, event: int) -> None:
        self._do("cuStreamWaitEvent", self._wait, stream, event, 0)

    def synchronize(self, event: int) -> None:
        self._call("cuEventSynchronize", event)

    def passed(self, event: int) -> bool:
        (result,) = self._api.cuEventQuery(event)
        if result == self._api.CUresult.CUDA_ERROR_NOT_READY:
            return False
        if result != self._api.CUresult.CUDA_SUCCESS:
            raise self._failure("cuEventQuery", result)
        return True

    def write_value(self, address: int, value: int, stream: int) -> None:
        self._call("cuStreamWriteValue64", stream, address, value, _WRITE_DEFAULT)

    def wait_value(self, address: int, value: int, stream: int) -> None:
        self._call("cuStreamWaitValue64", stream, address, value, _WAIT_AT_LEAST)

    # --- work ---------------------------------------------------------------------------------------

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._do("cuMemcpyAsync", self._copy, target, source, nbytes, stream)

    def copy_batch(
        self,
        targets: npt.NDArray[np.uint64],
        sources: npt.NDArray[np.uint64],
        sizes: npt.NDArray[np.uint64],
        stream: int,
    ) -> None:
        if self._batch is not None:
            self._succeed("cuMemcpyBatchAsync", self._batch(targets, sources, sizes, stream))
            return
        for target, source, nbytes in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            self.copy(target, source, nbytes, stream)

    def copy_rows(self, rows: RowCopy, stream: int) -> None:
        self._by_address(
            "cuMemcpy2DAsync", self._rows, row_table(np.array([rows[:6]]), outward=rows.outward), stream, rows.outward
        )

    def copy_row_table(self, table: RowTable, stream: int, *, outward: bool, batch: bool) -> None:
        if batch:
            self._by_address("cuMemcpy3DBatchAsync", self._row_batch, table, stream, outward)
        else:
            self._by_address("cuMemcpy2DAsync", self._rows, table, stream, outward)

    def _by_address(self, name: str, function: RowBatch | None, table: RowTable, stream: int, outward: bool) -> None:
        if function is None:
            raise TierError(f"{name} failed: the driver lacks it")
        self._succeed(name, function(table, stream, outward=outward))

    def _succeed(self, name: str, status: int) -> None:
        """Raise what `failure` makes of the CUresult of a call through its address, unless it is 0."""
        if status:
            try:
                result = self._api.CUresult(status)
            except ValueError:  # an answer newer than the bindings
                raise TierError(f"{name} failed: CUresult {status}") from None
            raise self._failure(name, result)

    def fill(self, address: int, value: int, nbytes: int, stream: int) -> None:
        self._call("cuMemsetD8Async", address, value, nbytes, stream)

    def compile(self, source: bytes, capability: tuple[int, int]) -> bytes:
        check_packages(self)
        return compile_kernel(source, capability, (self.version // 1000, self.version % 1000 // 10))

    def load(self, image: bytes) -> int:
        return int(self._call("cuModuleLoadData", image))

    def unload(self, module: int) -> None:
        self._call("cuModuleUnload", module)

    def function(self, module: int, name: str) -> int:
        return int(self._call("cuModuleGetFunction", module, name.encode()))

    def launch(self, function: int, grid: int, block: int, argument: ctypes.Structure, stream: int) -> None:
        parameter = ctypes.c_void_p(ctypes.addressof(argument))  # the array of parameters has this one element
        array = ctypes.addressof(parameter)
        self._do("cuLaunchKernel", self._launch, function, grid, 1, 1, block, 1, 1, 0, stream, array, 0)

    # --- other processes ----------------------------------------------------------------------------

    def exportable(self, address: int) -> bool:
        which = self._api.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
        return bool(self._call("cuPointerGetAttribute", which, address))

    def export_memory(self, address: int) -> bytes:
        return _content(self._call("cuIpcGetMemHandle", address), _IPC_HANDLE_BYTES)

    def open_memory(self, handle: bytes) -> int:
        named = self._filled(self._api.CUipcMemHandle(), handle)
        flags = self._api.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        return int(self._call("cuIpcOpenMemHandle", named, int(flags)))

    def close_memory(self, address: int) -> None:
        self._call("cuIpcCloseMemHandle", address)

    def export_event(self, event: int) -> bytes:
        return _content(self._call("cuIpcGetEventHandle", event), _IPC_HANDLE_BYTES)

    def open_event(self, handle: bytes) -> int:
        return int(self._call("cuIpcOpenEventHandle", self._filled(self._api.CUipcEventHandle(), handle)))

    @staticmethod
    def _filled(named: Any, handle: bytes) -> Any:
        if len(handle) != _IPC_HANDLE_BYTES:
            raise TierError(f"a CUDA IPC handle has {_IPC_HANDLE_BYTES} bytes, this one {len(handle)}")
        ctypes.memmove(named.getPtr(), handle, _IPC_HANDLE_BYTES)
        return named


def _content(struct: Any, nbytes: int) -> bytes:
    """The bytes of one of the bindings' structs, valid for as long as this parameter lives."""
    return ctypes.string_at(struct.getPtr(), nbytes)


def _text(padded: bytes) -> str:
    return padded.partition(b"\0")[0].decode(errors="replace")


NEWER = (sys.maxsize, 0)  # a CUDA version
_lock = threading.Lock()  # ranks start at the same time: one compiles, the others use its result


def compile_kernel(source: bytes, capability: tuple[int, int], driver: tuple[int, int] = NEWER) -> bytes:
    """A cubin, or NUL-terminated PTX, for a device of this compute capability, once for each in a process.

    If NVRTC does not know the architecture, it makes PTX for the newest older one, which the driver translates on load.

    driver: the CUDA version that the driver supports; NEWER stands for any version above NVRTC's.
    Raises TierError if NVRTC is missing, if the driver could not translate the PTX, or if the source does not compile;
    then the error has NVRTC's log.
    """
    with _lock:
        return _compile(source, capability, driver)


def nvrtc_version() -> tuple[int, int] | None:
    """NVRTC's version; None if NVRTC cannot be loaded (`compile_kernel` then raises the better error)."""
    try:
        from cuda.bindings import nvrtc

        result, major, minor = nvrtc.nvrtcVersion()
    except Exception:  # noqa: BLE001 - the bindings load libnvrtc at the first call, and have changed how that fails
        return None
    return (int(major), int(minor)) if result == nvrtc.nvrtcResult.NVRTC_SUCCESS else None


@functools.lru_cache(maxsize=16)
def _compile(source: bytes, capability: tuple[int, int], driver: tuple[int, int]) -> bytes:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise TierError("cuda-bindings is not installed: pip install 'transferd[cuda]'", code="no_cuda") from error
    try:
        return _run(nvrtc, source, capability, driver)
    except TierError:
        raise
    except Exception as error:  # the bindings load libnvrtc at the first call, and have changed how that fails
        sentence = " ".join(str(error).split())
        what = f"cannot load NVRTC ({sentence}): pip install 'transferd[cuda]'"
        raise TierError(what, code="no_cuda") from error


def _run(nvrtc: Any, source: bytes, capability: tuple[int, int], driver: tuple[int, int]) -> bytes:
    wanted = capability[0] * 10 + capability[1]
    known = [int(arch) for arch in _call(nvrtc, nvrtc.nvrtcGetSupportedArchs())]
    if wanted < min(known):
        oldest = f"{min(known) // 10}.{min(known) % 10}"
        what = f"this GPU's compute capability {capability[0]}.{capability[1]} is older than NVRTC supports ({oldest})"
        raise TierError(what)
    exact = wanted in known
    if not exact:
        check_ptx(nvrtc_version() or driver, driver, capability)
    arch = f"sm_{wanted}" if exact else f"compute_{max(arch for arch in known if arch < wanted)}"
    options = [f"--gpu-architecture={arch}".encode(), b"--std=c++17"]
    program = _call(nvrtc, nvrtc.nvrtcCreateProgram(source, b"transferd.cu", 0, [], []))
    try:
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = _read(nvrtc, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            text = log.rstrip(b"\0").decode(errors="replace")
            raise TierError(f"the kernel does not compile for {arch}: {result.name}\n{text}")
        if exact:
            return _read(nvrtc, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
        return _read(nvrtc, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def check_ptx(nvrtc: tuple[int, int], driver: tuple[int, int], capability: tuple[int, int]) -> None:
    """Raise TierError if this driver cannot translate this NVRTC's PTX. A GPU that NVRTC does not support needs PTX.

    A driver translates PTX of its own CUDA version and of older ones (CUDA's minor version compatibility).
    """
    if nvrtc <= driver:
        return
    has, its = (f"{major}.{minor}" for major, minor in (driver, nvrtc))
    what = (
        f"NVRTC {its} does not know this GPU (compute capability {capability[0]}.{capability[1]}) and makes PTX for it"
    )
    package = f"nvidia-cuda-nvrtc-cu{driver[0]}" if driver[0] < 13 else "nvidia-cuda-nvrtc"
    remedy = f"pip install '{package}=={has}.*', or install a driver for CUDA {its}"
    raise TierError(f"{what}, which a driver for CUDA {has} cannot load: {remedy}", code="no_cuda")


def _read(nvrtc: Any, size_of: Any, get: Any, program: Any) -> bytes:
    buffer = bytearray(_call(nvrtc, size_of(program)))
    _call(nvrtc, get(program, buffer))
    return bytes(buffer)


def _call(nvrtc: Any, answer: tuple[Any, ...]) -> Any:
    result, *values = answer
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise TierError(f"NVRTC failed: {result.name}")
    return values[0] if values else None
