"""An engine in a process of its own, which may run as another user and lends the daemon memory of many kinds.

    python -m tests.machine.hostile.lender UID ENDPOINT ENGINE BLOCKS PAGE_BYTES

Reads one JSON list a line, [command, arguments…], and prints one JSON value for each: what came of it.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import mmap
import os
import sys
import zlib
from typing import Any

from transferd import Engine, Pages, ReadStorageTask, SyncClient, TransferError, WriteStorageTask, shm_pages

SHM = "/dev/shm/"


class Lender:
    def __init__(self, endpoint: str, engine: str, blocks: int, page_bytes: int) -> None:
        self.client = SyncClient(endpoint, engine=engine, await_ready=False)
        self.pages = Pages(layers=1, page_bytes=page_bytes, blocks=blocks, identity="lender")
        self.nbytes = blocks * page_bytes
        self.stride = page_bytes
        self.fds: dict[str, int] = {}
        self.count = 0

    def windows(self, page_bytes: int, stride: int) -> str:
        """Its blocks are all windows of this size over the memory that they would have as blocks."""
        blocks = (self.nbytes - page_bytes) // stride + 1
        self.pages = Pages(layers=1, page_bytes=page_bytes, blocks=blocks, identity="lender", windows=True)
        self.stride = stride
        return "ok"

    def register(self, weights: str = "") -> str:
        facts = {"weights": weights} if weights else {}
        self.client.register(Engine(ranks=1, model="m", layout=self.pages, fingerprint=facts))
        return "ok"

    def make(self, name: str, sparse: bool = False) -> int:
        """Memory with a name, or a memfd if the name is empty."""
        if name:
            fd = os.open(SHM + name, os.O_RDWR | os.O_CREAT, 0o660)
        else:
            fd = os.memfd_create("lent", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        if name.startswith("transferd."):
            fcntl.flock(fd, fcntl.LOCK_EX)  # until this process ends
        os.ftruncate(fd, self.nbytes)
        if not sparse:
            os.posix_fallocate(fd, 0, self.nbytes)
        self.fds[name] = fd
        return fd

    def open_name(self, name: str) -> int:
        return os.open(SHM + name, os.O_RDWR)

    def renew(self, name: str) -> int:
        """Other memory under the same name, or the same descriptor's number."""
        old = self.fds[name]
        if name:
            os.unlink(SHM + name)
            return self.make(name)
        fd = self.make(name)
        os.dup2(fd, old)
        os.close(fd)
        self.fds[name] = old
        return old

    def paint(self, name: str, value: int) -> str:
        os.pwrite(self.fds[name], bytes([value]) * self.nbytes, 0)
        return "ok"

    def colours(self, name: str, block: int) -> list[int]:
        return sorted(set(os.pread(self.fds[name], self.stride, block * self.stride)))

    def offer(self, memory: str | int, canary: bool = False, offset: int = 0, raw: bool = False) -> str:
        """raw: a handle that is made by hand, so that the library refuses nothing itself."""
        segments = [(offset, self.stride)]
        if raw:
            from transferd.tiers.base import DeviceHandle
            from transferd.tiers.owner import as_data, this_process

            where = {"name": memory} if isinstance(memory, str) else {"fd": memory}
            data = where | {"nbytes": self.nbytes + offset, "segments": segments, "owner": as_data(this_process())}
            handle = DeviceHandle("shm", data)
        else:
            handle = shm_pages(memory, segments)
        caches = None
        if canary:
            held = mmap.mmap(self.fds[memory if isinstance(memory, str) else ""], self.nbytes)
            caches = self.pages.views(held, segments)
        self.client.offer(0, handle, caches=caches)
        return "ok"

    def write(self, prefix: str, blocks: list[int]) -> list[Any]:
        return self._task(WriteStorageTask, prefix, blocks)

    def read(self, prefix: str, blocks: list[int]) -> list[Any]:
        return self._task(ReadStorageTask, prefix, blocks)

    def _task(self, kind: Any, prefix: str, blocks: list[int]) -> list[Any]:
        self.count += 1
        keys = [f"{prefix}{number}" for number in range(len(blocks))]
        task = kind(task_id=f"{os.getpid()}.{self.count}", keys=keys, gpu_block_ids=blocks, timeout=10.0)
        result = self.client.submit(task)
        error = ["", ""] if result.error is None else [result.error.code, result.error.message]
        return [str(result.status), len(result.block_ids), *error]

    def truncate(self, name: str, nbytes: int) -> str:
        os.ftruncate(self.fds[name], nbytes)
        return "ok"

    def punch(self, name: str) -> str:
        """Give all pages back to the machine, but keep the length. A sealed memfd allows it, too."""
        keep_size, punch_hole = 1, 2
        libc = ctypes.CDLL(None, use_errno=True)
        nbytes = ctypes.c_long(self.nbytes)
        if libc.fallocate(self.fds[name], keep_size | punch_hole, ctypes.c_long(0), nbytes) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return "ok"

    def poison(self, name: str, block: int) -> str:
        """Let the kernel treat a page as broken hardware. Needs root, and a kernel with CONFIG_MEMORY_FAILURE."""
        libc = ctypes.CDLL(None, use_errno=True)
        libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        with mmap.mmap(self.fds[name], self.nbytes) as mapped:
            view = ctypes.c_char.from_buffer(mapped)
            address = ctypes.addressof(view) + block * self.stride
            done = libc.madvise(address, mmap.PAGESIZE, 100)  # MADV_HWPOISON
            code = ctypes.get_errno()
            del view
        return "ok" if done == 0 else f"OSError: {os.strerror(code)}"

    def digest(self, name: str) -> int:
        return zlib.crc32(os.pread(self.fds[name], self.nbytes, 0))


def main() -> None:
    uid, endpoint, engine, blocks, page_bytes = sys.argv[1:]
    os.setgroups([])
    os.setgid(int(uid))
    os.setuid(int(uid))
    lender = Lender(endpoint, engine, int(blocks), int(page_bytes))
    with lender.client:
        print(json.dumps("here"), flush=True)
        for line in sys.stdin:
            command, *arguments = json.loads(line)
            try:
                answer = getattr(lender, command)(*arguments)
            except TransferError as error:
                answer = f"{error.reason}: {error}"
            except OSError as error:
                answer = f"OSError: {error}"
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
