"""cuMemcpyBatchAsync, called through its address.

The bindings take lists and turn each element into an object. For 10,000 copies that takes far longer than
submitting them (`bench copy --device cuda` shows both). The driver returns the function's address, and one call
with arrays does it.

The function's signature changed: CUDA 12.8 introduced it with a `failIdx` before the stream, CUDA 13.0 dropped
that. The driver returns the one for the version we ask for, whatever the bindings were built for. Never ask a
driver for a version above its own: a 12.8 driver may answer with what it has, or refuse (the manuals of 12.8 and
13.0 disagree). The attributes struct is CUDA 12.8's; later versions keep its layout. (cuda.h of 12.8 and 13.0;
CUmemcpyAttributes, cuGetProcAddress.)
"""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

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


class BatchCopy(Protocol):
    """Submit copies and return 0 or a CUresult. Takes uint64 arrays of equal length, at least one element."""

    def __call__(self, targets: Addresses, sources: Addresses, sizes: Addresses, stream: int) -> int: ...


_pointer, _size = ctypes.c_void_p, ctypes.c_size_t
# (dsts, srcs, sizes, count, attrs, attrsIdxs, numAttrs, [failIdx,] stream)
_SINCE_13_0 = ctypes.CFUNCTYPE(ctypes.c_int, _pointer, _pointer, _pointer, _size, _pointer, _pointer, _size, _pointer)
_SINCE_12_8 = ctypes.CFUNCTYPE(
    ctypes.c_int, _pointer, _pointer, _pointer, _size, _pointer, _pointer, _size, _pointer, _pointer
)


def find_batch_copy(api: Any, version: int) -> BatchCopy | None:
    """The call, or None if this driver lacks it. api: cuda.bindings.driver, initialised. version: the driver's."""
    for since, signature in ((13000, _SINCE_13_0), (12080, _SINCE_12_8)):
        address = _address(api, since) if version >= since else 0
        if address:
            return _bound(signature(address), fails=since < 13000)
    return None


def _address(api: Any, version: int) -> int:
    result, address, status = api.cuGetProcAddress(b"cuMemcpyBatchAsync", version, 0)
    found = api.CUdriverProcAddressQueryResult.CU_GET_PROC_ADDRESS_SUCCESS
    return int(address) if result == api.CUresult.CUDA_SUCCESS and status == found else 0


def _bound(function: Any, *, fails: bool) -> BatchCopy:
    attributes = _Attributes(order=_STREAM_ORDER)
    first = ctypes.c_size_t(0)  # the attributes apply from copy 0 on

    def copy(targets: Addresses, sources: Addresses, sizes: Addresses, stream: int) -> int:
        failed = ctypes.c_size_t(0)
        extra = (ctypes.addressof(failed),) if fails else ()
        status: int = function(
            targets.ctypes.data,
            sources.ctypes.data,
            sizes.ctypes.data,
            len(sizes),
            ctypes.addressof(attributes),
            ctypes.addressof(first),
            1,
            *extra,
            stream,
        )
        return status

    return copy
