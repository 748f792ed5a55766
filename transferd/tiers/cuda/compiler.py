"""NVRTC: kernel text → machine code for one architecture, at start, once for each in a process.

No compiler is needed where transferd is installed, and a GPU that came after this release works: where
NVRTC does not know the device's architecture, it makes PTX for the newest one below it, which the
driver translates when it is loaded.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

from transferd.errors import TierError

_lock = threading.Lock()  # ranks start at once; one of them compiles, the others take its result


def compile_kernel(source: bytes, capability: tuple[int, int]) -> bytes:
    """A cubin, or PTX with its closing NUL, for a device of this compute capability.

    Raises TierError with NVRTC's own log where the text does not compile, or where NVRTC is missing.
    """
    with _lock:
        return _compile(source, capability)


@functools.lru_cache(maxsize=16)
def _compile(source: bytes, capability: tuple[int, int]) -> bytes:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise TierError("cuda-bindings is not installed: pip install 'transferd[cuda]'", code="no_cuda") from error
    try:
        return _run(nvrtc, source, capability)
    except TierError:
        raise
    except Exception as error:  # the bindings load libnvrtc at the first call, and have changed how that fails
        sentence = " ".join(str(error).split())
        raise TierError(f"NVRTC cannot be used ({sentence}): pip install 'transferd[cuda]'", code="no_cuda") from error


def _run(nvrtc: Any, source: bytes, capability: tuple[int, int]) -> bytes:
    wanted = capability[0] * 10 + capability[1]
    known = [int(arch) for arch in _call(nvrtc, nvrtc.nvrtcGetSupportedArchs())]
    if wanted < min(known):
        raise TierError(f"compute capability {capability[0]}.{capability[1]} is older than NVRTC supports")
    exact = wanted in known
    arch = f"sm_{wanted}" if exact else f"compute_{max(arch for arch in known if arch < wanted)}"
    options = [f"--gpu-architecture={arch}".encode(), b"--std=c++17"]
    program = _call(nvrtc, nvrtc.nvrtcCreateProgram(source, b"transferd.cu", 0, [], []))
    try:
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = _read(nvrtc, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            text = log.rstrip(b"\0").decode(errors="replace")
            raise TierError(f"a kernel does not compile for {arch}: {result.name}\n{text}")
        if exact:
            return _read(nvrtc, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
        return _read(nvrtc, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _read(nvrtc: Any, size_of: Any, get: Any, program: Any) -> bytes:
    buffer = bytearray(_call(nvrtc, size_of(program)))
    _call(nvrtc, get(program, buffer))
    return bytes(buffer)


def _call(nvrtc: Any, answer: tuple[Any, ...]) -> Any:
    result, *values = answer
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise TierError(f"NVRTC failed: {result.name}")
    return values[0] if values else None
