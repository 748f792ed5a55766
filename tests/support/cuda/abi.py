"""A FakeGpu behind CUDA's C interface: what the real bindings load as libcuda.so.1.

The bindings ask libcuda for each function by name and by the CUDA version whose signature they mean
(cuGetProcAddress), so a library with that one function is enough; the others are callbacks into Python.
With this the real cuda-bindings run over the fake: argument by argument, struct by struct, in whichever
version is installed.

    python -m tests.support.cuda.abi [--cuda 12080] MODULE [ARGUMENT …]

runs a module on a machine with such a GPU, whose driver is of that CUDA version (0: without batched copies).

A process can load one libcuda, so this is for processes of their own.
"""

# ruff: noqa: N802 (CUDA's names)
from __future__ import annotations

import ctypes
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.cuda.gpu import FakeGpu
from tests.support.cuda.shim import compiler
from transferd.errors import TierError
from transferd.tiers import pinned
from transferd.tiers.cuda import bindings, kernel, tier
from transferd.tiers.cuda.driver import RowCopy

SERVED = "TRANSFERD_FAKE_GPU"  # set in the environment of a program that runs with one, and of what it starts
LIBRARY = Path(__file__).parent / "libcuda.c"

_P, _N, _I, _U = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint
_NOT_FOUND = 500  # CUDA_ERROR_NOT_FOUND
_SYMBOL_NOT_FOUND = 1  # CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND


RESOLVER = ctypes.CFUNCTYPE(_I, ctypes.c_char_p, _P, _I, ctypes.c_uint64, _P)


class _Handle(ctypes.Structure):
    """CUipcMemHandle and CUipcEventHandle, which are passed by value."""

    _fields_ = (("reserved", ctypes.c_char * 64),)

    def content(self) -> bytes:
        return ctypes.string_at(ctypes.addressof(self), 64)


# What each function takes, by CUDA's name (the newest version of it that has no number in its name).
_BATCH = (_P, _P, _P, _N, _P, _P, _N)
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (_U,),
    "cuDriverGetVersion": (_P,),
    "cuGetErrorName": (_I, _P),
    "cuGetErrorString": (_I, _P),
    "cuDeviceGetCount": (_P,),
    "cuDeviceGet": (_P, _I),
    "cuDeviceGetName": (_P, _I, _I),
    "cuDeviceGetUuid": (_P, _I),
    "cuDeviceGetPCIBusId": (_P, _I, _I),
    "cuDeviceGetAttribute": (_P, _I, _I),
    "cuDevicePrimaryCtxRetain": (_P, _I),
    "cuDevicePrimaryCtxRelease": (_I,),
    "cuCtxPushCurrent": (_P,),
    "cuCtxGetDevice": (_P,),
    "cuCtxPopCurrent": (_P,),
    "cuCtxGetStreamPriorityRange": (_P, _P),
    "cuMemAlloc": (_P, _N),
    "cuMemFree": (_P,),
    "cuMemGetInfo": (_P, _P),
    "cuMemGetAddressRange": (_P, _P, _P),
    "cuMemHostRegister": (_P, _N, _U),
    "cuMemHostUnregister": (_P,),
    "cuStreamCreate": (_P, _U),
    "cuStreamCreateWithPriority": (_P, _U, _I),
    "cuStreamDestroy": (_P,),
    "cuStreamSynchronize": (_P,),
    "cuStreamWaitEvent": (_P, _P, _U),
    "cuEventCreate": (_P, _U),
    "cuEventDestroy": (_P,),
    "cuEventRecord": (_P, _P),
    "cuEventSynchronize": (_P,),
    "cuEventQuery": (_P,),
    "cuStreamWriteValue64": (_P, _P, ctypes.c_uint64, _U),
    "cuStreamWaitValue64": (_P, _P, ctypes.c_uint64, _U),
    "cuMemcpyAsync": (_P, _P, _N, _P),
    "cuMemcpy2DAsync": (_P, _P),
    "cuMemsetD8Async": (_P, ctypes.c_ubyte, _N, _P),
    "cuModuleLoadData": (_P, _P),
    "cuModuleUnload": (_P,),
    "cuModuleGetFunction": (_P, _P, ctypes.c_char_p),
    "cuLaunchKernel": (_P, _U, _U, _U, _U, _U, _U, _U, _P, _P, _P),
    "cuThreadExchangeStreamCaptureMode": (_P,),
    "cuPointerGetAttribute": (_P, _I, _P),
    "cuIpcGetMemHandle": (_P, _P),
    "cuIpcOpenMemHandle": (_P, _Handle, _U),
    "cuIpcCloseMemHandle": (_P,),
    "cuIpcGetEventHandle": (_P, _P),
    "cuIpcOpenEventHandle": (_P, _Handle),
    "cuMemcpyBatchAsync 12080": (*_BATCH, _P, _P),
    "cuMemcpyBatchAsync 13000": (*_BATCH, _P),
    "cuMemcpy3DBatchAsync 13000": (_N, _P, ctypes.c_uint64, _P),
}


_HOST, _DEVICE = 1, 2  # CUmemorytype


class _Side(ctypes.Structure):
    """One side of CUDA_MEMCPY2D."""

    _fields_ = (
        ("x", _N), ("y", _N), ("kind", ctypes.c_int), ("host", ctypes.c_size_t), ("device", ctypes.c_uint64),
        ("array", ctypes.c_size_t), ("pitch", _N),
    )  # fmt: skip


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = (("source", _Side), ("target", _Side), ("width", _N), ("height", _N))


class FakeLibcuda:
    """The functions of libcuda, over a FakeGpu. Attributes are the C functions, by name; status is returned."""

    def __init__(self, gpu: FakeGpu, codes: Callable[[str], int]) -> None:
        self.gpu = gpu
        self._code = codes
        self._texts: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self._functions: dict[str, Any] = {}
        for name, arguments in SIGNATURES.items():
            work = getattr(self, "_" + name.replace(" ", "_"))
            self._functions[name] = ctypes.CFUNCTYPE(_I, *arguments)(self._answering(work))
        self._functions["cuGetProcAddress"] = RESOLVER(self.resolve)

    def _answering(self, work: Callable[..., None]) -> Callable[..., int]:
        def answer(*arguments: Any) -> int:
            try:
                work(*(0 if argument is None else argument for argument in arguments))
            except TierError:
                return self._code(self.gpu.answer)
            return 0

        return answer

    def resolve(self, symbol: bytes, function: int, version: int, _flags: int, status: int) -> int:
        """cuGetProcAddress."""
        name = symbol.decode()
        if name == "cuMemcpyBatchAsync":
            # A driver gives the newest that it has, also when it is asked for one that came after it (12.8's manual).
            newest = min(version, self.gpu.version) if self.gpu.batches else 0
            name += " 13000" if newest >= 13000 else " 12080" if newest >= 12080 else " of later"
        if name == "cuMemcpy3DBatchAsync" and self.gpu.row_batches and min(version, self.gpu.version) >= 13000:
            name += " 13000"
        found = self._functions.get(name)
        if status:
            _I.from_address(status).value = 0 if found else _SYMBOL_NOT_FOUND
        _P.from_address(function).value = ctypes.cast(found, _P).value if found else None
        return 0 if found else _NOT_FOUND

    # --- devices ------------------------------------------------------------------------------------

    def _cuInit(self, _flags: int) -> None:
        if self.gpu.device_count() == 0:
            self.gpu._refuse("cuInit", "CUDA_ERROR_NO_DEVICE")

    def _cuDriverGetVersion(self, to: int) -> None:
        _put(_I, to, self.gpu.version)

    def _cuGetErrorName(self, _code: int, to: int) -> None:
        self._text(to, b"?")

    def _cuGetErrorString(self, code: int, to: int) -> None:
        self._text(to, f"text of {code}".encode())

    def _text(self, to: int, text: bytes) -> None:
        kept = self._texts.setdefault(hash(text), ctypes.create_string_buffer(text))
        _put(_P, to, ctypes.addressof(kept))

    def _cuDeviceGetCount(self, to: int) -> None:
        _put(_I, to, self.gpu.device_count())

    def _cuDeviceGet(self, to: int, index: int) -> None:
        _put(_I, to, index)

    def _cuDeviceGetName(self, to: int, size: int, device: int) -> None:
        ctypes.memmove(to, self.gpu.describe(device).name.encode().ljust(size, b"\0"), size)

    def _cuDeviceGetUuid(self, to: int, device: int) -> None:
        ctypes.memmove(to, bytes.fromhex(self.gpu.describe(device).uuid), 16)

    def _cuDeviceGetPCIBusId(self, to: int, size: int, device: int) -> None:
        ctypes.memmove(to, self.gpu.describe(device).pci.upper().encode().ljust(size, b"\0"), size)

    def _cuDeviceGetAttribute(self, to: int, which: int, device: int) -> None:
        info = self.gpu.describe(device)
        major, minor = info.capability
        # CU_DEVICE_ATTRIBUTE_…: COMPUTE_CAPABILITY_MAJOR, _MINOR, MULTIPROCESSOR_COUNT, CAN_USE_64_BIT_STREAM_MEM_OPS,
        # CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, COMPUTE_MODE
        told = {75: major, 76: minor, 16: info.multiprocessors, 122: info.words, 91: info.same_address, 20: 0}
        _put(_I, to, int(told[which]))

    def _cuDevicePrimaryCtxRetain(self, to: int, device: int) -> None:
        _put(_P, to, self.gpu.retain(device))

    def _cuDevicePrimaryCtxRelease(self, device: int) -> None:
        self.gpu.release(device)

    def _cuCtxPushCurrent(self, context: int) -> None:
        self.gpu.push(context)

    def _cuCtxGetDevice(self, to: int) -> None:
        device = self.gpu.current_device()
        if device is None:
            self.gpu._refuse("cuCtxGetDevice", "CUDA_ERROR_INVALID_CONTEXT")
        _put(_I, to, device)

    def _cuCtxPopCurrent(self, to: int) -> None:
        _put(_P, to, self.gpu.pop())

    def _cuThreadExchangeStreamCaptureMode(self, mode: int) -> None:
        if _I.from_address(mode).value != 2:  # CU_STREAM_CAPTURE_MODE_RELAXED
            self.gpu.problems.append("a thread is made stricter while others capture a graph")
        self.gpu.allow_during_capture()

    def _cuCtxGetStreamPriorityRange(self, least: int, greatest: int) -> None:
        _put(_I, least, 0)
        _put(_I, greatest, -5)

    # --- memory -------------------------------------------------------------------------------------

    def _cuMemAlloc(self, to: int, nbytes: int) -> None:
        _put(_P, to, self.gpu.allocate(nbytes))

    def _cuMemFree(self, address: int) -> None:
        self.gpu.free(address)

    def _cuMemGetInfo(self, free: int, total: int) -> None:
        for to, value in zip((free, total), self.gpu.memory_info(), strict=True):
            _put(_N, to, value)

    def _cuMemGetAddressRange(self, start: int, nbytes: int, address: int) -> None:
        for to, value in zip((start, nbytes), self.gpu.address_range(address), strict=True):
            _put(_N, to, value)

    def _cuMemHostRegister(self, address: int, nbytes: int, flags: int) -> None:
        if flags != 3:  # portable and mapped
            self.gpu.problems.append(f"host memory is registered with flags {flags}")
        self.gpu.register_host(address, nbytes)

    def _cuMemHostUnregister(self, address: int) -> None:
        self.gpu.unregister_host(address)

    # --- streams and events -------------------------------------------------------------------------

    def _cuStreamCreate(self, to: int, flags: int) -> None:
        self._non_blocking(flags)
        _put(_P, to, self.gpu.create_stream())

    def _cuStreamCreateWithPriority(self, to: int, flags: int, priority: int) -> None:
        self._non_blocking(flags)
        _put(_P, to, self.gpu.create_stream(urgent=priority < 0))

    def _non_blocking(self, flags: int) -> None:
        if flags != 1:
            self.gpu.problems.append("a stream waits for the default one")

    def _cuStreamDestroy(self, stream: int) -> None:
        self.gpu.destroy_stream(stream)

    def _cuStreamSynchronize(self, stream: int) -> None:
        self.gpu.synchronize_stream(stream)

    def _cuStreamWaitEvent(self, stream: int, event: int, _flags: int) -> None:
        self.gpu.wait(stream, event)

    def _cuEventCreate(self, to: int, flags: int) -> None:
        if flags & 3 != 3:
            self.gpu.problems.append("an event spins when it is waited for, or takes times")
        _put(_P, to, self.gpu.create_event(shared=bool(flags & 4)))

    def _cuEventDestroy(self, event: int) -> None:
        self.gpu.destroy_event(event)

    def _cuEventRecord(self, event: int, stream: int) -> None:
        self.gpu.record(event, stream)

    def _cuEventSynchronize(self, event: int) -> None:
        self.gpu.synchronize(event)

    def _cuEventQuery(self, event: int) -> None:
        if not self.gpu.passed(event):
            self.gpu.answer = "CUDA_ERROR_NOT_READY"
            raise TierError("not ready")

    def _cuStreamWriteValue64(self, stream: int, address: int, value: int, flags: int) -> None:
        if flags:
            self.gpu.problems.append(f"a word is written with flags {flags}: without the barrier that orders it")
        self.gpu.write_value(address, value, stream)

    def _cuStreamWaitValue64(self, stream: int, address: int, value: int, flags: int) -> None:
        if flags:
            self.gpu.problems.append(f"a word is waited for with flags {flags}, which is not 'at least'")
        self.gpu.wait_value(address, value, stream)

    # --- work ---------------------------------------------------------------------------------------

    def _cuMemcpyAsync(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self.gpu.copy(target, source, nbytes, stream)

    def _cuMemcpy2DAsync(self, where: int, stream: int) -> None:
        copy = _Copy2D.from_address(where)
        outward = copy.source.kind == _DEVICE
        device, host = (copy.source, copy.target) if outward else (copy.target, copy.source)
        if (device.kind, host.kind) != (_DEVICE, _HOST) or any((device.x, device.y, host.x, host.y)):
            self.gpu.problems.append("rows are not copied between the device and the host, from their beginning")
        self.gpu.copy_rows(
            RowCopy(device.device, device.pitch, host.host, host.pitch, copy.width, copy.height, outward), stream
        )

    def _cuMemsetD8Async(self, address: int, value: int, nbytes: int, stream: int) -> None:
        self.gpu.fill(address, value, nbytes, stream)

    def _cuMemcpyBatchAsync_12080(self, *arguments: int) -> None:
        _put(_N, arguments[-2], 2**64 - 1)
        self._cuMemcpyBatchAsync_13000(*arguments[:-2], arguments[-1])

    def _cuMemcpyBatchAsync_13000(self, *arguments: int) -> None:
        *arrays, count, attributes, first, kinds, stream = arguments
        order, *hints = (_I * 6).from_address(attributes)
        if (order, hints, kinds, _N.from_address(first).value) != (1, [0] * 5, 1, 0):
            self.gpu.problems.append("a batch is not in stream order throughout")
        targets, sources, sizes = (np.array((ctypes.c_uint64 * count).from_address(at)) for at in arrays)
        self.gpu.copy_batch(targets, sources, sizes, stream)

    def _cuMemcpy3DBatchAsync_13000(self, count: int, operations: int, flags: int, stream: int) -> None:
        """CUDA_MEMCPY3D_BATCH_OP has 14 words: two operands (kind, address, row length, layer height, a hint), …"""
        table = np.array((ctypes.c_uint64 * (14 * count)).from_address(operations)).reshape(count, 14)
        height, depth, order = table[:, 11], table[:, 12], table[:, 13]
        pointers = (table[:, [0, 5]] == 1).all() and (table[:, [3, 8]] == height[:, None]).all()
        if not pointers or flags or (depth != 1).any() or (order != 1).any() or table[:, [4, 9]].any():
            self.gpu.problems.append(
                "a batch of rows is not of pointers, of one layer each, in stream order throughout"
            )
        here, memory = int(table[0, 1]), self.gpu.memory
        cache = (*memory.owned.values(), *memory.opened.values())
        outward = any(one.start <= here < one.start + one.nbytes for one in cache)
        self.gpu.copy_row_table(table, stream, outward=outward, batch=True)

    def _cuModuleLoadData(self, to: int, image: int) -> None:
        if ctypes.string_at(image, 4) != b"\x7fELF":
            self.gpu.problems.append("a module is loaded that is no machine code")
        _put(_P, to, self.gpu.load(kernel.source()))

    def _cuModuleUnload(self, module: int) -> None:
        self.gpu.unload(module)

    def _cuModuleGetFunction(self, to: int, module: int, name: bytes) -> None:
        _put(_P, to, self.gpu.function(module, name.decode()))

    def _cuLaunchKernel(self, function: int, *rest: int) -> None:
        grid, grid_y, grid_z, block, block_y, block_z, shared, stream, parameters, extra = rest
        if (grid_y, grid_z, block_y, block_z, shared, extra) != (1, 1, 1, 1, 0, 0):
            self.gpu.problems.append(f"a launch of an odd shape: {rest}")
        where = _P.from_address(parameters).value
        assert where is not None
        self.gpu.launch(function, grid, block, kernel.Move.from_address(where), stream)

    # --- other processes ----------------------------------------------------------------------------

    def _cuPointerGetAttribute(self, to: int, which: int, address: int) -> None:
        if which != 10:  # CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
            self.gpu.problems.append(f"pointer attribute {which} is asked for")
        ctypes.c_bool.from_address(to).value = self.gpu.exportable(address)

    def _cuIpcGetMemHandle(self, to: int, address: int) -> None:
        ctypes.memmove(to, self.gpu.export_memory(address), 64)

    def _cuIpcOpenMemHandle(self, to: int, handle: _Handle, flags: int) -> None:
        if flags != 1:  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, which has to be set
            self.gpu.problems.append(f"memory is opened with flags {flags}")
        _put(_P, to, self.gpu.open_memory(handle.content()))

    def _cuIpcCloseMemHandle(self, address: int) -> None:
        self.gpu.close_memory(address)

    def _cuIpcGetEventHandle(self, to: int, event: int) -> None:
        ctypes.memmove(to, self.gpu.export_event(event), 64)

    def _cuIpcOpenEventHandle(self, to: int, handle: _Handle) -> None:
        _put(_P, to, self.gpu.open_event(handle.content()))


def _put(kind: Any, to: int, value: int) -> None:
    kind.from_address(to).value = value


def serve(gpu: FakeGpu) -> None:
    """Make `gpu` this process's only GPU, for every library that loads libcuda.so.1 from now on. Once."""
    from cuda.bindings import driver as api

    command = compiler()
    if command is None:
        raise TierError("there is no C compiler to make a libcuda with")
    fake = FakeLibcuda(gpu, lambda name: int(getattr(api.CUresult, name)))
    with tempfile.TemporaryDirectory(prefix="transferd-libcuda-") as directory:
        built = Path(directory) / "libcuda.so.1"
        subprocess.run(
            [command, "-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1", "-o", str(built), str(LIBRARY)],
            check=True,
            timeout=60,
        )
        library = ctypes.CDLL(str(built), mode=ctypes.RTLD_GLOBAL)  # found from now on by its soname
    resolver = RESOLVER(fake.resolve)
    library.transferd_serve(resolver)
    _served.append((library, resolver, fake))


_served: list[Any] = []  # what the bindings call into, for as long as the process lives


def main(module: str, *arguments: str) -> None:
    """Run a module with a fake GPU; what went wrong on the GPU is an exit code of 3 and lines on stderr."""
    version = 13000
    if module == "--cuda":
        version, module, *rest = int(arguments[0]), *arguments[1:]
        arguments = tuple(rest)
    gpu = FakeGpu(capacity=8 << 30, version=version or 12040, batches=version > 0, row_batches=version >= 13000)
    serve(gpu)
    setattr(bindings, "check_packages", lambda _: None)  # noqa: B010 - the fake loads what any NVRTC makes
    setattr(tier, "check_packages", lambda _: None)  # noqa: B010
    pinned.REGISTER_MOST = 1 << 20  # so that copies meet many registrations, as those of gigabytes do
    os.environ[SERVED] = "1"
    sys.argv = [module, *arguments]
    code: Any = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    wrong = gpu.wrong()
    for line in wrong[:20]:
        print(line, file=sys.stderr)
    sys.exit(3 if wrong else code)


if __name__ == "__main__":
    main(*sys.argv[1:])
