"""DLPack: a capsule through which any framework takes an array without a copy.

A consumer takes over the capsule by renaming it and calls its deleter when it is done. A capsule that is never
taken over frees itself. Either way `owner` stays alive until then. (DLPack 0.8, dlpack.h: DLManagedTensor.)
"""

from __future__ import annotations

import atexit
import ctypes
import math
from typing import Any

CPU, CUDA = 1, 2  # DLDeviceType
_CODES = {"int": 0, "uint": 1, "float": 2}  # DLDataTypeCode, by the beginning of numpy's name
_NAME = b"dltensor"


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("index", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _ManagedTensor(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_keep_for_ever = ctypes.pythonapi.Py_IncRef
_keep_for_ever.argtypes = (ctypes.py_object,)
_keep_for_ever.restype = None
_alive: dict[int, tuple[Any, ...]] = {}  # address of a managed tensor → what it keeps alive

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, _Deleter)
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.argtypes = (ctypes.c_void_p, ctypes.c_char_p)
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype = ctypes.c_void_p
_pointer_of.argtypes = (ctypes.c_void_p, ctypes.c_char_p)


def _destroy(capsule: int) -> None:
    """The capsule's destructor. Does nothing if a consumer has renamed the capsule, and so owns the tensor."""
    if _is_valid(capsule, _NAME):
        _alive.pop(_pointer_of(capsule, _NAME), None)


_deleter = _Deleter(lambda address: _alive.pop(address, None))  # the consumer calls it when it is done
_destructor = _Deleter(_destroy)


@atexit.register
def _outlive() -> None:
    """Remove the deleter of tensors that are alive at the end, which DLPack allows; they stay until the process exits.

    Frameworks may drop tensors after Python has ended, when a call into Python would crash.
    """
    for kept in _alive.values():
        kept[0].deleter = None
        _keep_for_ever(kept)
    _keep_for_ever(_destructor)


def capsule(address: int, shape: tuple[int, ...], dtype: str, device: tuple[int, int], owner: object) -> Any:
    """A DLPack capsule of a C-contiguous array.

    dtype: numpy's name.
    device: (CPU or CUDA, index).
    """
    kind = dtype.rstrip("0123456789")
    sizes = (ctypes.c_int64 * len(shape))(*shape)
    strides = (ctypes.c_int64 * len(shape))(*(math.prod(shape[axis + 1 :]) for axis in range(len(shape))))
    managed = _ManagedTensor(
        tensor=_Tensor(
            data=address,
            device=_Device(*device),
            ndim=len(shape),
            dtype=_DataType(_CODES[kind], int(dtype.removeprefix(kind)), 1),
            shape=sizes,
            strides=strides,
        ),
        deleter=ctypes.cast(_deleter, ctypes.c_void_p),
    )
    where = ctypes.addressof(managed)
    _alive[where] = (managed, sizes, strides, owner)
    return _new_capsule(where, _NAME, _destructor)
