"""What SGLang needs of a GPU's packages at import, on a machine that has none. Import this before sglang.

sgl_kernel                        has no build for the CPU on PyPI: names without what is behind them
torchvision._meta_registrations   describes CUDA operators that PyTorch for the CPU does not have: left out

SGLang's host pools pin their memory with CUDA; `nothing_pinned` replaces that call.
"""

from __future__ import annotations

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
    """From now on SGLang's host pools do not ask CUDA to pin their memory."""
    from sglang.srt.mem_cache.pool_host import common

    common._cuda_host_register = lambda *_, **__: None
