"""The real kernel, compiled for the CPU: see shim.c."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

import numpy as np

from transferd.errors import TierError
from transferd.tiers.cuda.kernel import Move

SHIM = Path(__file__).parent / "shim.c"
FAULTS = {1: "a misaligned access", 2: "a read outside of all memory", 3: "a write outside of all memory"}


def compiler() -> str | None:
    """The C compiler that this machine has."""
    return shutil.which(os.environ.get("CC", "gcc")) or shutil.which("cc")


class ShimKernel:
    """The kernel of a .cu text, callable. Raises TierError if it does not compile, or where nothing compiles."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._lock = threading.Lock()  # the shim's state is the process's

    @property
    def shape(self) -> list[int]:
        """Sizes and offsets as the C side has them, in the order of shim.c."""
        count = ctypes.c_uint64.in_dll(self._library, "shape_count").value
        return list((ctypes.c_uint64 * count).in_dll(self._library, "shape"))

    def launch(self, grid: int, block: int, move: Move, ranges: list[tuple[int, int]]) -> tuple[str, dict[int, int]]:
        """Run it over memory that exists as `ranges` (start, end). Returns what went wrong, and accesses by width."""
        existing = np.array(ranges, dtype=np.uint64).reshape(-1, 2)
        fault = (ctypes.c_uint64 * 3)()
        counts = (ctypes.c_uint64 * 17)()
        with self._lock:
            self._library.launch(
                ctypes.c_uint(grid),
                ctypes.c_uint(block),
                ctypes.byref(move),
                existing.ctypes.data_as(ctypes.c_void_p),
                ctypes.c_uint64(len(existing)),
                fault,
                counts,
            )
        kind, address, nbytes = list(fault)
        wrong = f"{FAULTS[kind]}: {nbytes} bytes at {address:#x}" if kind else ""
        return wrong, {width: count for width, count in enumerate(counts) if count}


@functools.cache
def compile_shim(source: bytes) -> ShimKernel:
    """Compile a kernel text, once in a process."""
    command = compiler()
    if command is None:
        raise TierError("there is no C compiler to run kernels on the CPU with")
    with tempfile.TemporaryDirectory(prefix="transferd-shim-") as directory:
        text = Path(directory) / f"{hashlib.sha256(source).hexdigest()[:16]}.cu.h"
        text.write_bytes(source)
        library = Path(directory) / "kernel.so"
        options = [
            "-x",
            "c",
            "-std=gnu11",
            "-O2",
            "-fno-strict-aliasing",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-Wno-unknown-pragmas",
        ]
        done = subprocess.run(
            [command, *options, f'-DKERNEL="{text}"', "-shared", "-fPIC", "-o", str(library), str(SHIM)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if done.returncode:
            raise TierError(f"the kernel does not compile for the CPU:\n{done.stderr}")
        return ShimKernel(ctypes.CDLL(str(library)))
