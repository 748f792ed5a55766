"""FastDeploy's exchange of device memory: one small POSIX shared memory object for each tensor of the cache.

Its operator set_data_ipc writes the object, share_external_data reads it, unset_data_ipc removes it:

    name     {plane name}_{layer}_rank{rank}.device{device}
    bytes    0 …  7  an unused count; zero
             8 … 71  the IPC handle of the tensor's allocation (cudaIpcMemHandle_t, 64 bytes)

(FastDeploy, custom_ops/gpu_ops: cuda_multiprocess.h, share_external_data.cu, unset_data_ipc.cu;
cache_transfer_manager.py for the names. rank is the rank within the tensor-parallel group, device the index as
the engine counts it.) XPU uses the same object, with its own handle in the same place.

The format lacks an offset (the handle names a whole allocation, so a tensor must start at its beginning), a size or
shape, and the process that wrote it; a reader must know these from elsewhere. An engine that died leaves its
objects behind; only opening the handle shows that the engine is dead.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from transferd.errors import EngineGone
from transferd.tiers.offered import DIRECTORY

HANDLE_BYTES = 64
COUNT_BYTES = 8
LONGEST = 4096  # bytes to read: the operators create one page
NAMES = {
    "key": "key_caches",
    "value": "value_caches",
    "key_scale": "key_cache_scales",
    "value_scale": "value_cache_scales",
    "indexer": "indexer_caches",
}


def segment_name(plane: str, layer: int, rank: int, device: int) -> str:
    """FastDeploy's name for the object of one tensor."""
    return f"{NAMES[plane]}_{layer}_rank{rank}.device{device}"


def read(name: str, directory: Path = DIRECTORY) -> bytes:
    """The 64 bytes of the handle in the object `name`. Raises EngineGone unless the engine has published it whole."""
    try:
        fd = os.open(directory / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(fd, "rb") as file:
            content = file.read(LONGEST)
    except OSError as error:
        why = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
        raise EngineGone(f"the engine has not published {name}: {why}") from error
    handle = content[COUNT_BYTES : COUNT_BYTES + HANDLE_BYTES]
    if len(handle) != HANDLE_BYTES:
        raise EngineGone(f"{name} has only {len(content)} bytes, too few for an IPC handle")
    if not any(handle):  # set_data_ipc creates the object first and fills it in afterwards
        raise EngineGone(f"{name} is still empty: the engine has not published its handle yet")
    return handle
