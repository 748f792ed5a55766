"""What SGLang needs of a GPU's packages at import, on a machine that has none. Import this before sglang.

sgl_kernel                        has no build for the CPU on PyPI: names without what is behind them
torchvision._meta_registrations   describes CUDA operators that PyTorch for the CPU does not have: left out

SGLang's host pools pin their memory with CUDA; `nothing_pinned` replaces that call. A server copies pages between its
device and its host pool with sgl_kernel; `copies_on_the_cpu` has it done with torch, for the layout page_first.
"""

from __future__ import annotations

import ctypes
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
    from sglang.srt.mem_cache.pool_host import mha

    mha.transfer_kv_all_layer_lf_pf = _device_to_host
    mha.transfer_kv_per_layer_pf_lf = _host_to_device


def _device_to_host(
    *,
    src_k_layers: Any,
    dst_k: Any,
    src_v_layers: Any,
    dst_v: Any,
    src_indices: Any,
    dst_indices: Any,
    item_size: int,
    num_layers: int,
    **_: int,
) -> None:
    """src_*_layers: addresses of each layer's tokens. dst_*: [token, layer, head, dim]. item_size: bytes of a token."""
    for addresses, target in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        for layer in range(num_layers):
            source = _tokens(int(addresses[layer]), int(src_indices.max()) + 1, item_size, target)
            target[dst_indices, layer] = source[src_indices]


def _host_to_device(
    *, src_k: Any, dst_k: Any, src_v: Any, dst_v: Any, src_indices: Any, dst_indices: Any, layer_id: int, **_: int
) -> None:
    """src_*: [token, layer, head, dim]. dst_*: the layer's, [token, head, dim]."""
    dst_k[dst_indices] = src_k[src_indices, layer_id]
    dst_v[dst_indices] = src_v[src_indices, layer_id]


def _tokens(address: int, count: int, nbytes: int, like: Any) -> Any:
    """A view of the tokens at an address, with the type and shape of those of a [token, layer, head, dim] tensor."""
    import torch

    memory = (ctypes.c_char * (count * nbytes)).from_address(address)
    return torch.frombuffer(memory, dtype=like.dtype).view(count, *like.shape[2:])
