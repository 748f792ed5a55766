"""NUMA: finds the node next to a device, and requests memory there.

glibc does not wrap mbind(2), and libnuma would be one more package for one system call. So we call it by number.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from pathlib import Path

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
    """Make the kernel take the range's pages from `node`, except those that exist already. Returns "", or why not."""
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
