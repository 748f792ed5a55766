"""NVRTC: compiles the kernel's source for one architecture, at start, once per architecture and process.

So transferd needs no compiler on the machine, and supports GPUs newer than this release: if NVRTC does
not know the device's architecture, it produces PTX for the newest older one, which the driver translates on load.
"""

from __future__ import annotations

import functools
import sys
import threading
from typing import Any

from transferd.errors import TierError

NEWER = (sys.maxsize, 0)  # a CUDA version
_lock = threading.Lock()  # ranks start at the same time: one compiles, the others use its result


def compile_kernel(source: bytes, capability: tuple[int, int], driver: tuple[int, int] = NEWER) -> bytes:
    """A cubin, or NUL-terminated PTX, for a device of this compute capability.

    driver: the CUDA version that it supports; NEWER: one that is newer than NVRTC.
    Raises TierError if NVRTC is missing, if the driver could not translate the PTX, or if the source does not compile;
    then the error has NVRTC's log.
    """
    with _lock:
        return _compile(source, capability, driver)


def nvrtc_version() -> tuple[int, int] | None:
    """NVRTC's version; None if it cannot be loaded (`compile_kernel` then raises the better error)."""
    try:
        from cuda.bindings import nvrtc

        result, major, minor = nvrtc.nvrtcVersion()
    except Exception:  # noqa: BLE001 - the bindings load libnvrtc at the first call, and have changed how that fails
        return None
    return (int(major), int(minor)) if result == nvrtc.nvrtcResult.NVRTC_SUCCESS else None


@functools.lru_cache(maxsize=16)
def _compile(source: bytes, capability: tuple[int, int], driver: tuple[int, int]) -> bytes:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise TierError("cuda-bindings is not installed: pip install 'transferd[cuda]'", code="no_cuda") from error
    try:
        return _run(nvrtc, source, capability, driver)
    except TierError:
        raise
    except Exception as error:  # the bindings load libnvrtc at the first call, and have changed how that fails
        sentence = " ".join(str(error).split())
        what = f"cannot load NVRTC ({sentence}): pip install 'transferd[cuda]'"
        raise TierError(what, code="no_cuda") from error


def _run(nvrtc: Any, source: bytes, capability: tuple[int, int], driver: tuple[int, int]) -> bytes:
    wanted = capability[0] * 10 + capability[1]
    known = [int(arch) for arch in _call(nvrtc, nvrtc.nvrtcGetSupportedArchs())]
    if wanted < min(known):
        oldest = f"{min(known) // 10}.{min(known) % 10}"
        what = f"this GPU's compute capability {capability[0]}.{capability[1]} is older than NVRTC supports ({oldest})"
        raise TierError(what)
    exact = wanted in known
    if not exact:
        check_ptx(nvrtc_version() or driver, driver, capability)
    arch = f"sm_{wanted}" if exact else f"compute_{max(arch for arch in known if arch < wanted)}"
    options = [f"--gpu-architecture={arch}".encode(), b"--std=c++17"]
    program = _call(nvrtc, nvrtc.nvrtcCreateProgram(source, b"transferd.cu", 0, [], []))
    try:
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = _read(nvrtc, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            text = log.rstrip(b"\0").decode(errors="replace")
            raise TierError(f"the kernel does not compile for {arch}: {result.name}\n{text}")
        if exact:
            return _read(nvrtc, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
        return _read(nvrtc, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def check_ptx(nvrtc: tuple[int, int], driver: tuple[int, int], capability: tuple[int, int]) -> None:
    """Raise TierError if this driver cannot translate this NVRTC's PTX, which a GPU that NVRTC does not know needs.

    A driver translates PTX of its own CUDA version and of older ones (CUDA's minor version compatibility).
    """
    if nvrtc <= driver:
        return
    has, its = (f"{major}.{minor}" for major, minor in (driver, nvrtc))
    what = (
        f"NVRTC {its} does not know this GPU (compute capability {capability[0]}.{capability[1]}) and makes PTX for it"
    )
    package = f"nvidia-cuda-nvrtc-cu{driver[0]}" if driver[0] < 13 else "nvidia-cuda-nvrtc"
    remedy = f"pip install '{package}=={has}.*', or install a driver for CUDA {its}"
    raise TierError(f"{what}, which a driver for CUDA {has} cannot load: {remedy}", code="no_cuda")


def _read(nvrtc: Any, size_of: Any, get: Any, program: Any) -> bytes:
    buffer = bytearray(_call(nvrtc, size_of(program)))
    _call(nvrtc, get(program, buffer))
    return bytes(buffer)


def _call(nvrtc: Any, answer: tuple[Any, ...]) -> Any:
    result, *values = answer
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise TierError(f"NVRTC failed: {result.name}")
    return values[0] if values else None
