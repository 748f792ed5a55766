"""A machine whose GPU is a double, so that FastDeploy's workers and cache messager run as they are.

    PYTHONPATH=tests/machine/with_fastdeploy/gpu/site:FASTDEPLOY:TRANSFERD python …

Python then calls `install` at the start of every process: the engine's, the daemon's, and those that FastDeploy starts
by its own commands. Nothing is imported early; what is imported finds these in place of a GPU, and nothing else:

    paddle                 claims CUDA; paddle.full, and to_tensor on a "gpu:…", allocate the double's memory
    …ops.gpu.fastdeploy_ops  FastDeploy's compiled operators: those of operators.py. Every other one raises when called
    libcuda.so.1           tests.support.cuda, under the real cuda-bindings
    triton, decord, moviepy  modules ask for them, nothing that is run here does

The double's memory is shared memory. An IPC handle names a segment, and opens in another process as CUDA's does.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import select
import signal
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

OPERATORS = "fastdeploy.model_executor.ops.gpu"
COMPILED = f"{OPERATORS}.fastdeploy_ops"
ABSENT = ("triton", "decord", "moviepy", f"{OPERATORS}.")  # the last: extensions beside the operators
DEVICES = 8
MESSAGER = "cache_messager.py"
OWNER_VARIABLE = "TRANSFERD_TEST_OWNER"  # the first process of the machine, whose tests start all others
WRONG = "the GPU's double saw: "  # how a line begins that says what a process did wrong to it


def install() -> None:
    """Make this process one of a machine with such a GPU. Idempotent."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Finder())
    owner = int(os.environ.setdefault(OWNER_VARIABLE, str(os.getpid())))
    os.register_at_fork(after_in_child=lambda: _end_with(owner))  # the servers of FastDeploy's queues
    if any(argument.endswith(MESSAGER) for argument in sys.orig_argv):
        _end_with(owner)


def _end_with(owner: int) -> None:
    """Kill this process when that one ends, however it ends: neither a messager nor a queue's server would notice."""

    def wait() -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            select.select([os.pidfd_open(owner)], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


class Absent(types.ModuleType):
    """Something compiled that is not here. It can be imported, named, inherited from and used as a decorator."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.__name__}.{name}")

    def __getitem__(self, _: Any) -> Absent:
        return self

    def __mro_entries__(self, _: Any) -> tuple[type, ...]:
        return ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not args:
            return self  # a decorator with arguments
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        raise RuntimeError(f"{self.__name__} is compiled code, which is not here")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds what is absent, and changes what is there right after it was imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name == COMPILED or name.split(".")[0] in ABSENT or name.startswith(ABSENT[-1]):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        after = _AFTER.get(name)
        if after is None:
            return None
        return _found_by_others(self, name, after)

    def create_module(self, spec: Any) -> types.ModuleType:
        return Absent(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = ["/nonexistent"]
        if module.__name__ == COMPILED:
            from tests.machine.with_fastdeploy.gpu import operators

            for name in operators.__all__:
                setattr(module, name, getattr(operators, name))


def _found_by_others(finder: _Finder, name: str, after: Callable[[Any], None]) -> Any:
    sys.meta_path.remove(finder)
    try:
        spec = importlib.util.find_spec(name)
    finally:
        sys.meta_path.insert(0, finder)
    if spec is None or spec.loader is None:
        return None
    execute = spec.loader.exec_module

    def execute_and_change(module: types.ModuleType) -> None:
        execute(module)
        after(module)

    spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
    return spec


def _complete(operators: Any) -> None:
    operators.__getattr__ = Absent(operators.__name__).__getattr__


def _claim_cuda(paddle: Any) -> None:
    from tests.machine.with_fastdeploy.gpu import memory

    properties = types.SimpleNamespace(name="double", major=8, minor=0, total_memory=1 << 34, multi_processor_count=1)
    nothing = _Nothing()
    paddle.is_compiled_with_cuda = lambda: True
    paddle.static.cuda_places = lambda *_: ["gpu:0"]
    paddle.device.get_device = lambda: "gpu:0"
    for module in (paddle.device, paddle.device.cuda):
        module.get_device_properties = lambda *_: properties
        module.synchronize = module.empty_cache = nothing
        for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
            setattr(module, name, lambda *_: 0)
    paddle.device.Stream = lambda *_: nothing
    paddle.device.stream_guard = lambda _: contextlib.nullcontext()
    real = paddle.set_device
    paddle.set_device = paddle.device.set_device = lambda place: real("cpu" if place.startswith("gpu") else place)
    paddle.full, paddle.to_tensor = memory.full_of(paddle), memory.to_tensor_of(paddle)
    place = type("Place", (paddle.CPUPlace,), {"__str__": lambda _: "Place(gpu:0)"})()
    paddle.Tensor.place = property(lambda _: place)  # FastDeploy reads a device's number out of it


class _Nothing:
    """A stream, and calls that have nothing to wait for."""

    stream_base = types.SimpleNamespace(cuda_stream=0)

    def __call__(self, *_: Any) -> None:
        return None


def _serve_libcuda(_: Any) -> None:
    from tests.support.cuda import abi
    from tests.support.cuda.gpu import FakeGpu

    gpu = FakeGpu(devices=DEVICES)
    abi.serve(gpu)
    atexit.register(lambda: [print(WRONG + line, file=sys.stderr) for line in gpu.wrong()])


_AFTER: dict[str, Callable[[Any], None]] = {
    "paddle": _claim_cuda,
    OPERATORS: _complete,
    "cuda.bindings.driver": _serve_libcuda,
}
