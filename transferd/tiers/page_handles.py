"""Handles over pages in memory that an engine made, for `client.offer`: the engine's side of tiers/arrays.py."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from transferd.errors import RequestError, TierError
from transferd.tiers.base import DeviceHandle
from transferd.tiers.offered import DIRECTORY, MORE, check_name, sealed
from transferd.tiers.owner import as_data, this_process
from transferd.tiers.populate import allocate

Segment = Sequence[int]  # (offset, block_stride), or (offset, block_stride, which memory), in bytes


def shm_pages(
    memory: str | int | Sequence[str | int], segments: Sequence[Segment], *, nbytes: int | Sequence[int] | None = None
) -> DeviceHandle:
    """A handle over pages in shared memory that this process made.

    memory: a name in /dev/shm, or a file descriptor (a memfd), which must stay open until the daemon or this client is
        gone; it is sealed against shrinking, if possible. Or a list of these. Each must be your user's own.
    nbytes: how many bytes of each to map; None maps all. Bytes that are not allocated yet are allocated now.
    segments: for each layer (offset, block_stride), or (offset, block_stride, i) for memory[i], in bytes: block b of
        the layer starts at offset + b * block_stride.

    Do not begin the name with `transferd.`: a daemon that starts removes such files unless a process holds their flock.

    A descriptor needs an ipc:// connection. With a daemon before 0.4, it also needs one of the same user.
    Raises TierError if there is no such memory, RequestError if it cannot be offered.
    """
    memories = [memory] if isinstance(memory, str | int) else list(memory)
    sizes = [nbytes] * len(memories) if nbytes is None or isinstance(nbytes, int) else list(nbytes)
    if not memories or len(sizes) != len(memories):
        raise RequestError(f"{len(memories)} memories with {len(sizes)} sizes", code="bad_value")
    first, *more = [_memory(one, size) for one, size in zip(memories, sizes, strict=True)]
    data = first | {"segments": [list(one) for one in segments], "owner": as_data(this_process())}
    return DeviceHandle("shm", data | ({MORE: more} if more else {}))


def _memory(memory: str | int, nbytes: int | None) -> dict[str, Any]:
    """One memory in a handle, all of it allocated."""
    if isinstance(memory, str):
        where: dict[str, Any] = {"name": check_name(memory)}
    else:
        sealed(memory)
        where = {"fd": memory}
    try:
        fd = os.open(DIRECTORY / memory, os.O_RDWR | os.O_CLOEXEC) if isinstance(memory, str) else memory
        try:
            size = os.stat(fd).st_size
            nbytes = size if nbytes is None else nbytes
            allocate(fd, min(nbytes, size), repr(memory))
        finally:
            if isinstance(memory, str):
                os.close(fd)
    except OSError as error:
        raise TierError(f"cannot offer shared memory {memory!r}: {error.strerror}") from error
    return where | {"nbytes": nbytes}


def cuda_pages(
    memory: Any, segments: Sequence[Segment], *, device: int, event: bytes = b"", driver: Any = None
) -> DeviceHandle:
    """A handle over pages in GPU memory that this process allocated with cudaMalloc.

    memory: an address, a contiguous array with `__cuda_array_interface__`, or a list of them.
    segments: for each layer (offset, block_stride), or (offset, block_stride, i) for memory[i], in bytes.
    device: its index in this process.
    event: 64 bytes of an IPC event that copies wait for (torch.cuda.Event(interprocess=True).ipc_handle()).

    The memory stays yours: keep it allocated until the daemon or this client is gone. Raises RequestError, TierError.
    """
    from transferd.tiers.cuda.engine import export_pages  # imported here because it needs CUDA

    parts = list(memory) if isinstance(memory, list | tuple) else [memory]
    return DeviceHandle("cuda_ipc", export_pages(parts, segments, device=device, event=event, driver=driver))
