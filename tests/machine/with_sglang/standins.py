"""What SGLang needs of a GPU's packages at import, on a machine that has none. Import this before sglang.

sgl_kernel                        has no build for the CPU on PyPI: names without what is behind them
torchvision._meta_registrations   describes CUDA operators that PyTorch for the CPU does not have: left out

SGLang's host pools pin their memory with CUDA; `nothing_pinned` replaces that call. A server copies pages between its
device and its host pool with sgl_kernel; `copies_on_the_cpu` has torch do it, for each layout of keys and values.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

MISSING = ("sgl_kernel", "torchvision._meta_registrations")


class Named:
    """Stands for anything that is named at import and never used on a CPU."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Named(f"{self._name}.{name}")

    def __call__(self, *_: object, **__: object) -> Any:
        raise NotImplementedError(f"{self._name} needs a GPU")


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Named(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if fullname in MISSING or fullname.startswith("sgl_kernel."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=fullname == "sgl_kernel")
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing in it."""


if not any(isinstance(one, _Finder) for one in sys.meta_path):
    sys.meta_path.insert(0, _Finder())


def nothing_pinned() -> None:
    """From now on SGLang does not ask CUDA to pin memory: its host pools, and torch for its LoRA adapters."""
    import torch
    from sglang.srt.mem_cache.pool_host import base

    for name in ("tensor", "empty", "zeros"):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *_: tensor

    base.HostKVCache.pin_memory = property(lambda _: False, lambda *_: None)


def _unpinned(make: Any) -> Any:
    @functools.wraps(make)
    def made(*given: Any, **more: Any) -> Any:
        return make(*given, **more | {"pin_memory": False} if "pin_memory" in more else more)

    return made


def copies_on_the_cpu() -> None:
    """From now on SGLang's host pools of keys and values copy tokens with torch."""
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    MHATokenToKVPoolHost.backup_from_device_all_layer = _device_to_host
    MHATokenToKVPoolHost.load_to_device_per_layer = _host_to_device


def _device_to_host(pool: Any, _: Any, host: Any, device: Any, io_backend: str) -> None:
    del io_backend
    for layer in range(pool.layer_num):
        for part, buffers in enumerate((pool.device_k_buffers, pool.device_v_buffers)):
            view, at = _of_layer(pool, part, layer, host)
            view[at] = buffers[layer][device]


def _host_to_device(
    pool: Any, _: Any, host: Any, device: Any, layer: int, io_backend: str, *, is_draft: bool = False
) -> None:
    del io_backend, is_draft
    for part, buffers in enumerate((pool.device_k_buffers, pool.device_v_buffers)):
        view, at = _of_layer(pool, part, layer, host)
        buffers[layer][device] = view[at]


def _of_layer(pool: Any, part: int, layer: int, tokens: Any) -> tuple[Any, Any]:
    """Keys (part 0) or values of a layer in the host pool, and where tokens lie in them: each is [head, dim]."""
    page, at = tokens // pool.page_size, tokens % pool.page_size
    whole = pool.kv_buffer[part]
    if pool.layout == "layer_first":
        return whole[layer], tokens
    if pool.layout == "page_first":
        return whole[:, layer], tokens
    if pool.layout == "page_first_direct":
        return whole[:, layer], (page, at)
    return whole[:, :, :, layer].transpose(1, 2), (page, at)  # page_head
