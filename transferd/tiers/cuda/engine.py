"""The engine's side of a shared GPU cache: maps the daemon's memory as arrays, or exports the engine's own memory.

    caches = attach(handle.data).caches       # {plane: [one DeviceArray per layer]}
    data = export(caches, device=0, event=…)  # of memory that this process allocated

Frameworks take a DeviceArray without a copy, through `__cuda_array_interface__` (torch.as_tensor, cupy.asarray,
numba) or DLPack (from_dlpack in torch, paddle and jax). The mapping lives as long as any array over it.

Ordering: push a task once its blocks are computed, or let it name a number of a timeline (client/timeline.py). An
engine with one process for each daemon and one compute stream may record `Attached.ready` instead and push at once.
With several ranks this is wrong: nothing makes a slow rank record before the push (docs/adr/0043).
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import sys
import weakref
from collections.abc import Mapping, Sequence
from collections.abc import Mapping as Map
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import structlog

from transferd.errors import DeviceLost, RequestError, TierError
from transferd.tiers.cuda import dlpack, ipc
from transferd.tiers.cuda.bindings import open_driver
from transferd.tiers.cuda.driver import DeviceInfo, Driver, on_device
from transferd.tiers.cuda.host_words import open_page
from transferd.tiers.cuda.timeline import EngineTimelines
from transferd.tiers.owner import as_data, check_owner, this_process

log = structlog.get_logger(__name__)

# Element types by the names that exporters use; numpy has no bfloat16 and no float8.
_ELEMENTS = {"f2": "float16", "f4": "float32"}
_ELEMENTS |= dict.fromkeys(("u2", "i2", "V2"), "uint16") | dict.fromkeys(("u1", "i1", "V1"), "uint8")


class _Held:
    """Keeps a mapping and its context alive while anything refers to this object."""

    def __init__(self, driver: Driver, info: DeviceInfo, handle: ipc.CudaHandle) -> None:
        self.driver = driver
        self.same_address = info.same_address
        self.context = driver.retain(info.index)
        try:
            with driver.current(self.context):
                self.mapping = ipc.Mapping(driver, info, handle)
        except BaseException:
            driver.release(info.index)
            raise
        end = weakref.finalize(self, _unmap, driver, info.index, self.context, self.mapping)
        end.atexit = False  # the end of the process frees everything anyway


def _unmap(driver: Driver, index: int, context: int, mapping: ipc.Mapping) -> None:
    with contextlib.suppress(DeviceLost):  # then there is no mapping any more
        try:
            with driver.current(context):
                mapping.close()
        finally:
            driver.release(index)


class DeviceArray:
    """A C-contiguous array in GPU memory, borrowed from the mapping that it keeps alive.

    dtype: numpy's name, with uint16 for bfloat16; `view` changes it.
    """

    def __init__(self, address: int, shape: tuple[int, ...], dtype: str, device: int, owner: object) -> None:
        self.address = address
        self.shape = shape
        self.dtype = np.dtype(dtype)
        self.device = device
        self._owner = owner

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def view(self, dtype: str) -> DeviceArray:
        """The same bytes as elements of another type of the same size."""
        if np.dtype(dtype).itemsize != self.dtype.itemsize:
            raise RequestError(f"cannot view {self.dtype.name} as {dtype}: the element sizes differ")
        return DeviceArray(self.address, self.shape, dtype, self.device, self._owner)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3, without a stream: consumers order their work by timelines and by task results."""
        place = {"data": (self.address, False), "strides": None}
        return place | {"shape": self.shape, "typestr": self.dtype.str, "version": 3}

    def __dlpack_device__(self) -> tuple[int, int]:
        return (dlpack.CUDA, self.device)

    def __dlpack__(self, **_wishes: object) -> Any:
        """Ignores the consumer's wishes (stream, version, copy): every consumer reads version 0.8."""
        return dlpack.capsule(self.address, self.shape, self.dtype.name, self.__dlpack_device__(), self._owner)


class ReadyEvent:
    """The event that copies wait for before they touch device blocks. For engines of one process and one stream."""

    def __init__(self, held: _Held) -> None:
        self._held = held

    def record(self, stream: int) -> None:
        """Make copies wait for the work that is on this CUDA stream (its address) now. Replaces the last record."""
        held = self._held
        with held.driver.current(held.context):
            held.driver.record(held.mapping.event, stream)


@dataclass(frozen=True, slots=True)
class Attached:
    """A rank's cache that this process has mapped."""

    caches: dict[str, list[DeviceArray]]  # {plane: [one array per layer]}
    ready: ReadyEvent | None  # None if it cannot be shared
    timelines: EngineTimelines | None = None  # None if they cannot be shared


def attach(data: Map[str, Any], driver: Driver | None = None) -> Attached:
    """Map the memory of a "cuda_ipc" handle.

    Raises RequestError if the data is not a handle; TierError if the owner has exited, the GPU is not visible to this
    process, or mapping fails.
    """
    handle = ipc.read(data)
    if handle.segments:
        raise TierError("the engine made this memory itself, as pages: only it can map it")
    check_owner(handle.owner)
    driver = driver if driver is not None else open_driver()
    info = _device_with(driver, handle.device)
    here = driver.current_device()
    if here is not None and here != info.index:
        what = "this thread computes on another GPU than the cache is on: check the order of cache.devices"
        log.warning(what, computes_on=here, cache_on=info.index, gpu=info.uuid)
    held = _Held(driver, info, handle)
    caches: dict[str, list[DeviceArray]] = {}
    for item in sorted(handle.arrays, key=lambda item: int(item["layer"])):
        start = held.mapping.regions[int(item.get("region", 0))].address
        array = DeviceArray(start + int(item["offset"]), tuple(item["shape"]), str(item["dtype"]), info.index, held)
        caches.setdefault(str(item["plane"]), []).append(array)
    return Attached(caches, ReadyEvent(held) if held.mapping.event else None, _timelines(held, handle))


def timelines(data: Map[str, Any], driver: Driver | None = None) -> EngineTimelines | None:
    """Map only the timelines of a handle, for the engine that owns the memory. Returns None if there are none.

    data: of the handle that `Client.device_handle` returns for the rank after the offer. Raises like `attach`.
    """
    handle = ipc.read(data)
    if handle.timelines is None:
        return None
    driver = driver if driver is not None else open_driver()
    words = msgspec.structs.replace(handle, regions=[], event="")
    return _timelines(_Held(driver, _device_with(driver, handle.device), words), handle)


def _timelines(held: _Held, handle: ipc.CudaHandle) -> EngineTimelines | None:
    if handle.timelines is None:
        return None
    driver, page = held.driver, None
    if handle.timelines.page is not None and held.same_address:
        with driver.current(held.context):
            page = open_page(handle.timelines.page, driver)
    address = 0
    if page is not None:
        address = page.address
        held.mapping.keep(page.close)
        held.mapping.keep(lambda: driver.unregister_host(address))
    return EngineTimelines(driver, held.context, held.mapping.words, handle.timelines, held, page=address)


def _device_with(driver: Driver, uuid: str) -> DeviceInfo:
    for index in range(driver.device_count()):
        info = driver.describe(index)
        if info.uuid == uuid:
            return info
    raise TierError(f"GPU {uuid} is not visible to this process: check CUDA_VISIBLE_DEVICES", code="no_cuda")


def export(
    caches: Map[str, Sequence[Any]], *, device: int, event: bytes = b"", driver: Driver | None = None
) -> dict[str, Any]:
    """Export memory of this process on GPU `device` and return the handle's data.

    caches: {plane: [one array per layer]}, contiguous, anything with `__cuda_array_interface__`.
    event: 64 bytes of an IPC event (torch.cuda.Event(interprocess=True).ipc_handle()).
    The caller still owns the memory, and must keep it allocated until the daemon has released it.

    Raises RequestError for arrays that are not contiguous or of unknown type, TierError (`not_shareable`) for memory
    that is not from cudaMalloc, naming the setting to change; then nothing is exported.
    """
    driver = driver if driver is not None else open_driver()
    places = [
        (f"{plane} of layer {layer}", described(array, f"{plane} of layer {layer}")[0])
        for plane, layers in caches.items()
        for layer, array in enumerate(layers)
    ]
    check_exportable(driver, places, device)
    regions: dict[int, ipc.ExportedRegion] = {}
    arrays: list[dict[str, Any]] = []
    with on_device(driver, device):
        for plane, layers in caches.items():
            for layer, array in enumerate(layers):
                address, shape, dtype = described(array, f"{plane} of layer {layer}")
                start, nbytes = driver.address_range(address)
                if start not in regions:
                    handle = driver.export_memory(start).hex()
                    regions[start] = ipc.ExportedRegion(handle=handle, nbytes=nbytes, into=start % ipc.BLOCK)
                place = {"plane": plane, "layer": layer, "offset": address - start, "shape": shape, "dtype": dtype}
                arrays.append(place | {"region": list(regions).index(start)})
    return _data(driver, device, event, list(regions.values()), arrays=arrays)


def export_pages(
    memory: Sequence[Any],
    segments: Sequence[Sequence[int]],
    *,
    device: int,
    event: bytes = b"",
    driver: Driver | None = None,
) -> dict[str, Any]:
    """The data of a handle over pages that this process has on GPU `device`. Ownership and errors: as for `export`.

    memory: addresses, or contiguous arrays with `__cuda_array_interface__`.
    segments: for each layer [offset, block_stride] or [offset, block_stride, i], in bytes from the start of memory[i].
    """
    driver = driver if driver is not None else open_driver()
    places = [
        (f"memory {number}", one if isinstance(one, int) else described(one, f"memory {number}")[0])
        for number, one in enumerate(memory)
    ]
    check_exportable(driver, places, device)
    regions: list[ipc.ExportedRegion] = []
    with on_device(driver, device):
        for _, address in places:
            start, nbytes = driver.address_range(address)
            handle, offset = driver.export_memory(start).hex(), address - start
            regions.append(
                ipc.ExportedRegion(handle=handle, offset=offset, nbytes=nbytes - offset, into=start % ipc.BLOCK)
            )
    return _data(driver, device, event, regions, segments=[list(segment) for segment in segments])


def _data(
    driver: Driver, device: int, event: bytes, regions: list[ipc.ExportedRegion], **of_regions: Any
) -> dict[str, Any]:
    uuid, owner = driver.describe(device).uuid, as_data(this_process())
    handle = ipc.CudaHandle(device=uuid, owner=owner, regions=regions, event=event.hex(), **of_regions)
    return ipc.as_data(handle)


def described(array: Any, what: str) -> tuple[int, list[int], str]:
    """Return address, shape and numpy type name of a contiguous array. Raises RequestError for anything else."""
    interface = array.__cuda_array_interface__
    shape = [int(size) for size in interface["shape"]]
    dtype = _ELEMENTS.get(str(interface["typestr"]).lstrip("<|="))
    if dtype is None:
        raise RequestError(f"{what} has elements of type {interface['typestr']}", code="bad_value")
    expected = np.dtype(dtype).itemsize
    for size, stride in zip(reversed(shape), reversed(interface.get("strides") or ()), strict=False):
        if stride != expected and size > 1:
            raise RequestError(f"{what} is not contiguous", code="bad_value")
        expected *= size
    return int(interface["data"][0]), shape, dtype


# CUDA IPC shares what cudaMalloc returned. Memory that an allocator reserves and maps itself (cuMemCreate) or takes
# from a pool (cudaMallocAsync) has no such handle: docs/adr/0039. These settings cause it: an environment variable, a
# text in its value, and what to do.
_SETTINGS = (
    ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:true", "unset it, or set expandable_segments:False"),
    ("PYTORCH_ALLOC_CONF", "expandable_segments:true", "unset it, or set expandable_segments:False"),
    ("PYTORCH_CUDA_ALLOC_CONF", "cudamallocasync", "set backend:native"),
    ("PYTORCH_ALLOC_CONF", "cudamallocasync", "set backend:native"),
    ("FLAGS_use_cuda_malloc_async_allocator", "1", "set it to 0"),
    ("FLAGS_use_virtual_memory_auto_growth", "1", "set it to 0"),
    ("FLAGS_use_cuda_malloc_async_allocator", "true", "set it to 0"),
    ("FLAGS_use_virtual_memory_auto_growth", "true", "set it to 0"),
    ("LD_PRELOAD", "torch_memory_saver", "start SGLang without --enable-memory-saver"),
)
_SLEEP_MODE = "vllm.device_allocator.cumem"  # imported, with an allocator in it, only in sleep mode


def check_exportable(driver: Driver, places: Sequence[tuple[str, int]], device: int) -> None:
    """Raise TierError (`not_shareable`) for the first of (what is there, address) that cannot be shared."""
    with on_device(driver, device):
        for what, address in places:
            if not driver.exportable(address):
                sentence = f"{what} is in memory that no other process can map (not from cudaMalloc)"
                raise TierError(f"{sentence}: {_remedy()}", code="not_shareable")


def _remedy() -> str:
    """The setting of this process that causes such memory, or, if none is found, all known ones."""
    for variable, text, remedy in _SETTINGS:
        if text in os.environ.get(variable, "").lower().replace(" ", ""):
            return f"{variable}={os.environ[variable]} causes this: {remedy}"
    if getattr(getattr(sys.modules.get(_SLEEP_MODE), "CuMemAllocator", None), "instance", None) is not None:
        return "vLLM's sleep mode causes this: start vLLM without --enable-sleep-mode"
    return (
        "switch off torch's expandable_segments and cudaMallocAsync, vLLM's sleep mode, SGLang's memory saver, "
        "Paddle's FLAGS_use_virtual_memory_auto_growth and FLAGS_use_cuda_malloc_async_allocator, and NCCL's symmetric "
        "memory; or let the daemon make the cache (cache.ownership)"
    )


_STREAM = 0


class CudaRows:
    """One array of blocks on GPU `device`; each block is contiguous. Borrows the memory.

    stride: bytes from block to block; None if the blocks are dense.

    Its copies are not ordered after other work on the device: let all work on the block end first.
    """

    def __init__(
        self, driver: Driver, device: int, address: int, shape: Sequence[int], itemsize: int, stride: int | None = None
    ) -> None:
        self.blocks = shape[0]
        self._driver = driver
        self._device = device
        self._address = address
        self._nbytes = math.prod(shape[1:]) * itemsize  # of a block
        self._stride = self._nbytes if stride is None else stride

    def read_block(self, block: int) -> bytes:
        buffer = ctypes.create_string_buffer(self._nbytes)
        self._copy(ctypes.addressof(buffer), self._address + block * self._stride)
        return buffer.raw

    def write_block(self, block: int, data: bytes) -> None:
        assert len(data) == self._nbytes
        buffer = ctypes.create_string_buffer(data, self._nbytes)
        self._copy(self._address + block * self._stride, ctypes.addressof(buffer))

    def _copy(self, target: int, source: int) -> None:
        driver = self._driver
        with on_device(driver, self._device):
            driver.copy(target, source, self._nbytes, _STREAM)
            driver.synchronize_stream(_STREAM)


def rows(
    caches: Mapping[str, Sequence[Any]], *, device: int, driver: Driver | None = None
) -> dict[str, list[CudaRows]]:
    """{plane: [one CudaRows per layer]}. Takes the same caches as `engine.export`, and raises RequestError like it."""
    driver = driver if driver is not None else open_driver()
    made: dict[str, list[CudaRows]] = {}
    for plane, layers in caches.items():
        for layer, array in enumerate(layers):
            address, shape, dtype = described(array, f"{plane} of layer {layer}")
            itemsize = {"uint8": 1, "uint16": 2, "float16": 2, "float32": 4}[dtype]
            made.setdefault(plane, []).append(CudaRows(driver, device, address, shape, itemsize))
    return made
