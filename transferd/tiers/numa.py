"""NUMA: finds the node next to a device, and requests memory there, by system call numbers (glibc has no mbind)."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections.abc import Sequence
from pathlib import Path

_MOVE_PAGES = {"x86_64": 279, "aarch64": 239}
_MBIND = {"x86_64": 237, "aarch64": 235}  # asm/unistd_64.h, asm-generic/unistd.h
_MPOL_PREFERRED = 1  # linux/mempolicy.h: there if it has room, else anywhere

_libc = ctypes.CDLL(None, use_errno=True)


def node_of_pci(address: str, sysfs: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """The node next to a PCI device (0000:17:00.0), according to the kernel; None if it does not know."""
    try:
        node = int((sysfs / address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def prefer_node(address: int, nbytes: int, node: int) -> str:
    """Make the kernel take the range's new pages from `node`. Returns "", or why the kernel refused."""
    number = _MBIND.get(platform.machine())
    if number is None or not 0 <= node < 1024:
        return f"mbind is not supported on {platform.machine()} with node {node}"
    words = node // 64 + 1
    mask = (ctypes.c_uint64 * words)()
    mask[node // 64] = 1 << (node % 64)
    arguments = (ctypes.c_long(number), ctypes.c_void_p(address), ctypes.c_ulong(nbytes), ctypes.c_int(_MPOL_PREFERRED))
    if _libc.syscall(*arguments, mask, ctypes.c_ulong(words * 64 + 1), ctypes.c_uint(0)) == 0:
        return ""
    code = ctypes.get_errno()
    return f"{errno.errorcode.get(code, code)}: {os.strerror(code)}"


def cpus_of_node(node: int, sysfs: Path = Path("/sys/devices/system/node")) -> list[int]:
    """The CPUs of a node that this process may run on; [] if they are unknown."""
    try:
        text = (sysfs / f"node{node}" / "cpulist").read_text().strip()
        spans = [part.partition("-") for part in text.split(",") if part]
        cpus = {cpu for first, _, last in spans for cpu in range(int(first), int(last or first) + 1)}
    except (OSError, ValueError):
        return []
    return sorted(cpus & os.sched_getaffinity(0))


def nodes_of_pages(addresses: Sequence[int]) -> list[int]:
    """The node of the page at each address; negative if the kernel does not know it. [] if the kernel cannot say."""
    number, count = _MOVE_PAGES.get(platform.machine()), len(addresses)
    if number is None or not count:
        return []
    pages = (ctypes.c_void_p * count)(*addresses)
    status = (ctypes.c_int * count)()
    arguments = (ctypes.c_long(number), ctypes.c_int(0), ctypes.c_ulong(count), pages, None, status, ctypes.c_int(0))
    return list(status) if _libc.syscall(*arguments) == 0 else []


def placement(address: int, nbytes: int, node: int, samples: int = 64) -> str:
    """Sample pages of a range. Returns "" if all are on the node, else how many are not."""
    step = max(1, nbytes // samples)
    found = [where for where in nodes_of_pages(range(address, address + nbytes, step)) if where >= 0]
    elsewhere = [where for where in found if where != node]
    if not elsewhere:
        return ""
    return f"{len(elsewhere)} of {len(found)} sampled pages are on NUMA node {elsewhere[0]}, the device is on {node}"
