"""What submitting a copy to a GPU costs the host, without a GPU: NVIDIA's bindings over a libcuda that does nothing.

    python -m benchmarks.gpu_submission

Prints, for each layout, direction and way of a copy: microseconds of this thread for a block and for 8 MiB, and the
share of one interpreter lock that a lane needs at 50 GB/s. "default" is the way that such a cache takes. The driver's
own time is not in it, and the GIL is released during each of its calls. Needs cuda-bindings and a C compiler. What it
decided: docs/adr/0044.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from transferd.blocks.copyplan import plan_copy
from transferd.blocks.layout import build_layout
from transferd.blocks.layout.base import Arena
from transferd.config import CacheSection
from transferd.errors import TierError
from transferd.tiers.cuda import pinning
from transferd.tiers.cuda.costs import CopyPath
from transferd.tiers.cuda.submitter import KernelTable, Submitter, plan_order
from transferd.tiers.cuda.tuning import DEFAULT, SLOT_BYTES
from transferd.tiers.pinned import HostRegion

BUS = 50e9  # bytes a second
BLOCKS = 256
RUNS = 5
WAYS: tuple[CopyPath, ...] = ("rows", "pairs", "gather", "straight")
LAYOUTS: dict[str, dict[str, object]] = {
    "GQA 80 x 16 KiB": {"layers": 80, "kv_heads": 2, "head_dim": 64, "block_size": 64},
    "MLA 61 x 72 KiB": {"attention": "mla", "layers": 61, "block_size": 64},
}
NOTHING = r"""
#include <stdint.h>
#include <string.h>
static int nothing(void) { return 0; }
static int version(int *to) { *to = 13000; return 0; }
static int address(void **to) { static uintptr_t next = 1 << 20; *to = (void *)(next += 1 << 26); return 0; }
int cuGetProcAddress_v2(const char *name, void **function, int cuda, uint64_t flags, int *status)
{
    (void)cuda, (void)flags;
    if (status) *status = 0;
    *function = !strcmp(name, "cuDriverGetVersion") ? (void *)version
              : !strcmp(name, "cuMemAlloc") || strstr(name, "Create") ? (void *)address
              : !strcmp(name, "cuGetProcAddress") ? (void *)cuGetProcAddress_v2 : (void *)nothing;
    return 0;
}
"""


def load_nothing() -> None:
    """Make a libcuda.so.1 that does nothing this process's."""
    with tempfile.TemporaryDirectory(prefix="transferd-nothing-") as directory:
        source, built = Path(directory) / "nothing.c", Path(directory) / "libcuda.so.1"
        source.write_text(NOTHING)
        command = ["cc", "-shared", "-fPIC", "-O2", "-Wl,-soname,libcuda.so.1", "-o", str(built), str(source)]
        subprocess.run(command, check=True, timeout=60)
        ctypes.CDLL(str(built), mode=ctypes.RTLD_GLOBAL)


def measure(name: str, cache: dict[str, object], way: CopyPath | None, *, outward: bool) -> None:
    from transferd.tiers.cuda.bindings import open_driver

    driver = open_driver()
    layout = build_layout(CacheSection(**cache, device_blocks=2 * BLOCKS, host_blocks=2 * BLOCKS))  # type: ignore[arg-type]
    arena, allocations = Arena(layout.device, 1 << 40), [(1 << 40, layout.device.extent)]
    order, _ = plan_order(arena, np.arange(len(layout.segments)), SLOT_BYTES, allocations, DEFAULT)
    table = KernelTable(arena, 1, order, SLOT_BYTES, row_batches=driver.row_batches, allocations=allocations)
    submitter = Submitter(driver, table, outward=outward, copy_path=way)
    ids = np.random.default_rng(1).permutation(2 * BLOCKS)[:BLOCKS].tolist()
    sides = (layout.device, ids, layout.host, ids) if outward else (layout.host, ids, layout.device, ids)
    host = HostRegion(4096)
    pinning._registered[host.address] = host.nbytes  # noqa: SLF001 - batches want registered memory
    best = float("inf")
    for _ in range(RUNS):
        plan = plan_copy(*sides)
        before = time.thread_time()
        for _ in submitter.steps(plan, host):
            pass
        best = min(best, time.thread_time() - before)
    del pinning._registered[host.address]  # noqa: SLF001
    host.close()
    block, piece = best / BLOCKS * 1e6, best / plan.nbytes * 8 * 1024**2 * 1e6
    share = best / (plan.nbytes / BUS)
    print(
        f"{name}, {'out' if outward else 'in':<3} {way or 'default':<8} {block:5.2f} us a block, "
        f"{piece:5.1f} us for 8 MiB, {share:.2f} of a lock at {BUS / 1e9:.0f} GB/s",
        flush=True,
    )


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    load_nothing()
    try:
        for name, cache in LAYOUTS.items():
            for way in (None, *WAYS):
                for outward in (True, False):
                    measure(name, cache, way, outward=outward)
    except TierError as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
