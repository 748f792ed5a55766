"""Many copies in one call of the driver API, from arrays.

The bindings take lists and turn each element into an object: for 10,000 copies that takes far longer than submitting
them. So these calls go to the driver's own functions, whose addresses cuGetProcAddress gives. ctypes releases the GIL.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import structlog

from transferd.errors import DeviceLost, TierError
from transferd.tiers.cuda.driver import Driver, RowTable

log = structlog.get_logger(__name__)

_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: the stream reads sources when it reaches the copy


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes. The locations are hints for managed and pageable memory; zero means none."""

    _fields_ = (
        ("order", ctypes.c_int),
        ("source", _Location),
        ("target", _Location),
        ("flags", ctypes.c_uint),
    )


Addresses = npt.NDArray[np.uint64]


def _place(array: Addresses) -> int:
    """Its address, in a third of the time that `array.ctypes` takes."""
    return ctypes.addressof(ctypes.c_char.from_buffer(array.data))


class BatchCopy(Protocol):
    """Submit copies and return 0 or a CUresult. Takes uint64 arrays of equal length, at least one element."""

    def __call__(self, targets: Addresses, sources: Addresses, sizes: Addresses, stream: int) -> int: ...


_pointer, _size = ctypes.c_void_p, ctypes.c_size_t
# CUDA 12.8 introduced the call with a `failIdx` before the stream, CUDA 13.0 dropped that. The driver returns the
# one for the version we ask for. Never ask for a version above the driver's own: it may answer with what it has, or
# refuse (the manuals of 12.8 and 13.0 disagree).
# (dsts, srcs, sizes, count, attrs, attrsIdxs, numAttrs, [failIdx,] stream)
_SINCE_13_0 = ctypes.CFUNCTYPE(ctypes.c_int, _pointer, _pointer, _pointer, _size, _pointer, _pointer, _size, _pointer)
_SINCE_12_8 = ctypes.CFUNCTYPE(
    ctypes.c_int, _pointer, _pointer, _pointer, _size, _pointer, _pointer, _size, _pointer, _pointer
)


def find_batch_copy(api: Any, version: int) -> BatchCopy | None:
    """cuMemcpyBatchAsync, called through its address; None if this driver lacks it. version: the driver's."""
    for since, signature in ((13000, _SINCE_13_0), (12080, _SINCE_12_8)):
        address = _address(api, since) if version >= since else 0
        if address:
            return _bound(signature(address), fails=since < 13000)
    return None


def _address(api: Any, version: int, name: bytes = b"cuMemcpyBatchAsync") -> int:
    result, address, status = api.cuGetProcAddress(name, version, 0)
    found = api.CUdriverProcAddressQueryResult.CU_GET_PROC_ADDRESS_SUCCESS
    return int(address) if result == api.CUresult.CUDA_SUCCESS and status == found else 0


def _bound(function: Any, *, fails: bool) -> BatchCopy:
    attributes = _Attributes(order=_STREAM_ORDER)
    first = ctypes.c_size_t(0)  # the attributes apply from copy 0 on
    failed = ctypes.c_size_t(0)
    pointers = (
        ctypes.addressof(attributes),
        ctypes.addressof(first),
        1,
        *([ctypes.addressof(failed)] if fails else []),
    )

    def copy(targets: Addresses, sources: Addresses, sizes: Addresses, stream: int) -> int:
        status: int = function(*map(_place, (targets, sources, sizes)), len(sizes), *pointers, stream)
        return status

    copy.__dict__["held"] = attributes, first, failed  # as long as the function, which has their addresses
    return copy


class RowBatch(Protocol):
    """Submit copies of rows and return 0 or a CUresult. table: as for Driver.copy_row_table."""

    def __call__(self, table: RowTable, stream: int, *, outward: bool) -> int: ...


# (numOps, opList, flags, stream); since CUDA 13.0 without a `failIdx`. Asked for only there.
_3D_SINCE_13_0 = ctypes.CFUNCTYPE(ctypes.c_int, _size, _pointer, ctypes.c_ulonglong, _pointer)
_2D = ctypes.CFUNCTYPE(ctypes.c_int, _pointer, _pointer)  # (pCopy, stream)
_HOST, _DEVICE = 1, 2  # CU_MEMORYTYPE_HOST, CU_MEMORYTYPE_DEVICE
_POINTER = 1  # CU_MEMCPY_OPERAND_TYPE_POINTER


def find_row_batch(api: Any, version: int) -> RowBatch | None:
    """cuMemcpy3DBatchAsync for rows; None if this driver lacks it. version: the driver's."""
    address = _address(api, 13000, b"cuMemcpy3DBatchAsync") if version >= 13000 else 0
    if not address:
        return None
    function = _3D_SINCE_13_0(address)

    def copy(table: RowTable, stream: int, *, outward: bool) -> int:  # noqa: ARG001 - its addresses say so
        status: int = function(len(table), _place(table), 0, stream)
        return status

    return copy


def find_rows(api: Any, version: int) -> RowBatch | None:
    """The same by a call of cuMemcpy2DAsync for each copy, which every driver has."""
    address = _address(api, version, b"cuMemcpy2DAsync")
    if not address:
        return None
    function = _2D(address)

    def copy(table: RowTable, stream: int, *, outward: bool) -> int:
        copies = _copies(table, outward=outward)
        first, nbytes = copies.ctypes.data, copies.strides[0]
        for at in range(first, first + copies.nbytes, nbytes):
            if status := function(at, stream):
                return int(status)
        return 0

    return copy


# CUDA_MEMCPY3D_BATCH_OP, 112 bytes: source at 0, target at 40, extent at 80, then the order and flags. An operand of
# kind pointer has that kind, an address, the length of a row, the height of a layer, and a hint.
_ONE = np.array([_POINTER, 0, 0, 0, 0, _POINTER, 0, 0, 0, 0, 0, 0, 1, _STREAM_ORDER], dtype=np.uint64)
_WORDS = [1, 2, 3, 6, 7, 8, 10, 11]  # those that differ from one operation to another, and where they are in rows
_FROM = {True: [0, 1, 5, 2, 3, 5, 4, 5], False: [2, 3, 5, 0, 1, 5, 4, 5]}  # by whether it goes out of the device


def row_table(rows: npt.NDArray[np.int64], *, outward: bool) -> RowTable:
    """Copies of rows as the driver takes them. rows: int64 [n, 6], the first six fields of a RowCopy each."""
    table = np.empty((len(rows), len(_ONE)), dtype=np.uint64)
    table[:] = _ONE
    table[:, _WORDS] = rows[:, _FROM[outward]]
    return table


def rows_in(table: RowTable, *, outward: bool) -> npt.NDArray[np.uint64]:
    """The rows of which `row_table` has made this."""
    return table[:, [1, 2, 6, 7, 10, 11] if outward else [6, 7, 1, 2, 10, 11]]


def _copies(table: RowTable, *, outward: bool) -> npt.NDArray[np.uint64]:
    """CUDA_MEMCPY2D, 128 bytes each. A side: x, y, kind, host address, device address, array, pitch."""
    device, device_pitch, host, host_pitch, width, height = rows_in(table, outward=outward).T
    copies = np.zeros((len(table), 16), dtype=np.uint64)
    of_device, of_host = (0, 7) if outward else (7, 0)
    copies[:, of_device + 2], copies[:, of_device + 4], copies[:, of_device + 6] = _DEVICE, device, device_pitch
    copies[:, of_host + 2], copies[:, of_host + 3], copies[:, of_host + 6] = _HOST, host, host_pitch
    copies[:, 14], copies[:, 15] = width, height
    return copies


_PAGE = mmap.PAGESIZE


def row_batches_work(driver: Driver) -> bool:
    """Whether a batch of rows moves the right bytes both ways on this GPU: tried once, before an engine's bytes move.

    Needs the device's context. Blocks. Raises DeviceLost.
    """
    if not driver.row_batches:
        return False
    with mmap.mmap(-1, 2 * _PAGE) as memory:
        content = np.frombuffer(memory, dtype=np.uint8)
        try:
            return _moves_rows(driver, content)
        except DeviceLost:
            raise
        except TierError as error:
            log.warning("the driver refused a batch of rows: each copy of rows is a call", reason=str(error))
            return False
        finally:
            del content


def _moves_rows(driver: Driver, content: npt.NDArray[np.uint8]) -> bool:
    host, rows, width, pitch, wide = content.ctypes.data, 5, 48, 80, 112
    before = np.random.default_rng(7).integers(0, 256, _PAGE, dtype=np.uint8)
    content[:_PAGE], content[_PAGE:] = before, 0
    device = driver.allocate(_PAGE)
    try:
        driver.register_host(host, 2 * _PAGE)
        try:
            inward = np.array([[device, wide, host, pitch, width, rows]] * 2, dtype=np.int64)
            inward[1, [0, 2]] += 2048
            outward = inward.copy()
            outward[:, 2] += _PAGE
            driver.copy_row_table(row_table(inward, outward=False), _DEFAULT_STREAM, outward=False, batch=True)
            driver.copy_row_table(row_table(outward, outward=True), _DEFAULT_STREAM, outward=True, batch=True)
            driver.synchronize_stream(_DEFAULT_STREAM)
        finally:
            driver.unregister_host(host)
    finally:
        driver.free(device)
    expected = np.zeros(_PAGE, dtype=np.uint8)
    for start in (0, 2048):
        for row in range(start, start + rows * pitch, pitch):
            expected[row : row + width] = before[row : row + width]
    right = bool((content[_PAGE:] == expected).all() and (content[:_PAGE] == before).all())
    if not right:
        log.warning("a batch of rows moved wrong bytes: each copy of rows is a call")
    return right


_DEFAULT_STREAM = 0
