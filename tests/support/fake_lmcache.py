"""The part of LMCache that TransferdL2 is written against, for machines without it; and objects in private memory.

tests/machine/with_lmcache runs the same class under the real one.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt

INTERNAL = "lmcache.v1.distributed.internal_api"
BASE = "lmcache.v1.distributed.l2_adapters.base"


class Bitmap:
    def __init__(self, size: int) -> None:
        self.bits = [False] * size

    def batched_set(self, indices: Sequence[int]) -> None:
        for i in indices:
            self.bits[i] = True


def L2StoreResult(success: bool, nbytes: int) -> int:  # noqa: N802 - LMCache has a class of this name
    return nbytes if success else -1


@dataclass(frozen=True)
class AdapterUsage:
    total_bytes_used: int
    total_capacity_bytes: int
    bytes_by_cache_salt: dict[str, int]


class L2AdapterInterface:
    def __init__(self, max_capacity_bytes: int = 0) -> None:
        self.stored: list[tuple[Any, int]] = []
        self.deleted: list[tuple[Any, int]] = []
        self.capacity = max_capacity_bytes
        self.listeners: list[Any] = []

    def register_listener(self, listener: Any) -> None:
        self.listeners.append(listener)

    def _notify_keys_stored(self, keys: list[Any], sizes: list[int]) -> None:
        self.stored += zip(keys, sizes, strict=True)

    def _notify_keys_accessed(self, keys: list[Any]) -> None:
        """Nothing listens."""

    def _notify_keys_deleted(self, keys: list[Any], sizes: list[int]) -> None:
        self.deleted += zip(keys, sizes, strict=True)

    def get_usage(self) -> AdapterUsage:
        return AdapterUsage(0, self.capacity, {})


class EventNotifier:
    def __init__(self) -> None:
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def fileno(self) -> int:
        return self._reader

    def notify(self) -> None:
        os.write(self._writer, b"!")

    def close(self) -> None:
        os.close(self._reader)
        os.close(self._writer)


@dataclass(frozen=True)
class Dtype:
    """Of torch: its name and the bytes of an element."""

    name: str
    itemsize: int

    def __str__(self) -> str:
        return f"torch.{self.name}"


UINT8, FLOAT16 = Dtype("uint8", 1), Dtype("float16", 2)


@dataclass(frozen=True)
class ObjectKey:
    chunk_hash: bytes
    model_name: str = "tiny"
    kv_rank: int = 0x01000100
    object_group_id: int = 0
    cache_salt: str = ""


@dataclass
class MemoryObj:
    """An object in private memory. used: bytes that serde has written; None: all."""

    shapes: list[tuple[int, ...]]
    dtypes: list[Dtype]
    used: int | None = None
    bytes: npt.NDArray[np.uint8] = field(init=False)

    def __post_init__(self) -> None:
        sizes = [int(np.prod(shape)) * one.itemsize for shape, one in zip(self.shapes, self.dtypes, strict=True)]
        self.bytes = np.zeros(sum(sizes), dtype=np.uint8)

    def get_shapes(self) -> list[tuple[int, ...]]:
        return self.shapes

    def get_dtypes(self) -> list[Dtype]:
        return self.dtypes

    def get_size(self) -> int:
        return self.bytes.nbytes if self.used is None else self.used

    @property
    def data_ptr(self) -> int:
        return self.bytes.ctypes.data

    @property
    def byte_array(self) -> memoryview:
        return self.bytes.data


def layout(one: MemoryObj) -> SimpleNamespace:
    """A MemoryLayoutDesc."""
    return SimpleNamespace(shapes=one.shapes, dtypes=one.dtypes)


@contextmanager
def installed() -> Iterator[None]:
    """`import lmcache…` finds these names."""
    names: dict[str, dict[str, Any]] = {
        "lmcache.lmcache_native": {"Bitmap": Bitmap},
        "lmcache.v1.distributed.api": {"ObjectKey": ObjectKey},
        INTERNAL: {"L2StoreResult": L2StoreResult},
        BASE: {"AdapterUsage": AdapterUsage, "L2AdapterInterface": L2AdapterInterface},
        "lmcache.v1.platform": {"create_event_notifier": EventNotifier},
    }
    modules: dict[str, types.ModuleType] = {}
    for name, content in names.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            modules.setdefault(".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
        for attribute, value in content.items():
            setattr(modules[name], attribute, value)
    ours = "transferd.adapters.lmcache.l2"
    with mock.patch.dict(sys.modules, modules):
        sys.modules.pop(ours, None)
        try:
            yield
        finally:
            sys.modules.pop(ours, None)
