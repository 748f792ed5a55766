"""Breaks a page of memory that a daemon has mapped, on a kernel without CONFIG_MEMORY_FAILURE.

userfaultfd can mark a page of a process as broken (UFFDIO_POISON): whoever touches it gets the signal of broken
hardware, SIGBUS with BUS_MCEERR_AR, and a system call gets EHWPOISON. The mark lies in the page tables of the process
that opened the userfaultfd. So the daemon opens one when its Python starts (`opened_at_start`); root takes the
descriptor out of it and marks a page, from which the memory has been taken first.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
from pathlib import Path

SYS_USERFAULTFD, SYS_PIDFD_GETFD = 323, 438  # x86-64
UFFDIO_API, UFFDIO_REGISTER, UFFDIO_POISON = 0xC018AA3F, 0xC020AA00, 0xC020AA08
API, FEATURE_POISON, MISSING = 0xAA, 1 << 14, 1
KEEP_SIZE, PUNCH_HOLE = 1, 2
AT_START = f"""
import ctypes, os, sys
if "transferd" in getattr(sys, "orig_argv", ()):
    ctypes.CDLL(None).syscall({SYS_USERFAULTFD}, os.O_CLOEXEC | os.O_NONBLOCK)
"""


def obstacle() -> str:
    """Why this kernel can mark no page; "" if it can."""
    if os.uname().machine != "x86_64":
        return "the numbers of system calls here are x86-64's"
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.syscall(SYS_USERFAULTFD, os.O_CLOEXEC | os.O_NONBLOCK)
    if fd < 0:
        return f"userfaultfd: {os.strerror(ctypes.get_errno())}"
    try:
        fcntl.ioctl(fd, UFFDIO_API, bytearray(struct.pack("<QQQ", API, FEATURE_POISON, 0)))
    except OSError as error:
        return f"UFFDIO_POISON: {error.strerror}"
    finally:
        os.close(fd)
    return ""


def opened_at_start(directory: Path) -> None:
    """Write a sitecustomize.py: a daemon with this directory in PYTHONPATH has a userfaultfd."""
    (directory / "sitecustomize.py").write_text(AT_START)


def break_page(pid: int, name: str, fd: int, offset: int) -> None:
    """Break the page at this offset of the shared memory, as the process `pid` has mapped it. Raises OSError.

    name: how its path in /proc/pid/maps ends. fd: of the memory; its page becomes a hole.
    """
    page = os.sysconf("SC_PAGESIZE")
    faults = _taken(pid, "anon_inode:[userfaultfd]")
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        fcntl.ioctl(faults, UFFDIO_API, bytearray(struct.pack("<QQQ", API, FEATURE_POISON, 0)))
        for start in _mapped_at(pid, name, offset):
            fcntl.ioctl(faults, UFFDIO_REGISTER, bytearray(struct.pack("<QQQQ", start, page, MISSING, 0)))
        if libc.fallocate(fd, KEEP_SIZE | PUNCH_HOLE, ctypes.c_long(offset), ctypes.c_long(page)) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        for start in _mapped_at(pid, name, offset):
            fcntl.ioctl(faults, UFFDIO_POISON, bytearray(struct.pack("<QQQq", start, page, 0, 0)))
    finally:
        os.close(faults)


def _taken(pid: int, link: str) -> int:
    """A copy of a descriptor of another process."""
    [number] = [int(entry.name) for entry in os.scandir(f"/proc/{pid}/fd") if os.readlink(entry.path) == link]
    process = os.pidfd_open(pid)
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        fd = int(libc.syscall(SYS_PIDFD_GETFD, process, number, 0))
        if fd < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return fd
    finally:
        os.close(process)


def _mapped_at(pid: int, name: str, offset: int) -> list[int]:
    """The addresses of this byte of the file, in every mapping of it."""
    found = []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        span, _, first, _, _, *path = line.split(maxsplit=5)
        start, end = (int(one, 16) for one in span.split("-"))
        if path and path[0].endswith(name) and int(first, 16) <= offset < int(first, 16) + end - start:
            found.append(start + offset - int(first, 16))
    if not found:
        raise ValueError(f"{pid} has not mapped byte {offset} of {name}")
    return found
