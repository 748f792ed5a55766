"""GPU memory from cuMemCreate, and its descriptor in another process: what docs/adr/0039 leaves out, tried out."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import numpy as np

from tests.machine.gpu.machine import Failed, Machine

_PIDFD_GETFD = 438  # Linux 5.6; the same number on every architecture


def _ask(api: Any, name: str, *arguments: Any) -> Any:
    result, *values = getattr(api, name)(*arguments)
    if result != api.CUresult.CUDA_SUCCESS:
        raise Failed(f"{name}: {result.name}")
    return values[0] if values else None


def _properties(api: Any, device: int) -> Any:
    wanted = api.CUmemAllocationProp()
    wanted.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    wanted.location.id = device
    wanted.requestedHandleTypes = api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    return wanted


def _mapped(api: Any, handle: Any, nbytes: int, device: int) -> int:
    """Where the allocation is in this process now. It stays until the process ends."""
    address = _ask(api, "cuMemAddressReserve", nbytes, 0, 0, 0)
    _ask(api, "cuMemMap", address, nbytes, 0, handle, 0)
    access = api.CUmemAccessDesc()
    access.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = device
    access.flags = api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    _ask(api, "cuMemSetAccess", address, nbytes, [access], 1)
    return int(address)


def create(device: int, nbytes: int) -> tuple[int, Any, int]:
    """Memory as an expandable segment has it: (address, handle, bytes). Requires the context."""
    from cuda.bindings import driver as api

    wanted = _properties(api, device)
    least = api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    grain = _ask(api, "cuMemGetAllocationGranularity", wanted, least)
    nbytes = -(-nbytes // grain) * grain
    handle = _ask(api, "cuMemCreate", nbytes, wanted, 0)
    return _mapped(api, handle, nbytes, device), handle, nbytes


def pooled(nbytes: int, stream: int) -> int:
    """Memory as cudaMallocAsync returns it. Requires the context."""
    from cuda.bindings import driver as api

    return int(_ask(api, "cuMemAllocAsync", nbytes, stream))


def exported(handle: Any) -> int:
    """A descriptor of this process for memory that `create` made."""
    from cuda.bindings import driver as api

    kind = api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    return int(_ask(api, "cuMemExportToShareableHandle", handle, kind, 0))


def _itself(pid: int) -> int:
    """The process that a command such as unshare has forked, or this one."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return _itself(int(children[0])) if children else pid


def read(machine: Machine, pid: int, made: dict[str, int]) -> str:
    """Take the descriptor out of that process, map the memory, and compare its bytes. What happened, in words."""
    from cuda.bindings import driver as api

    libc = ctypes.CDLL(None, use_errno=True)
    pidfd = os.pidfd_open(_itself(pid))
    fd = libc.syscall(_PIDFD_GETFD, pidfd, made["fd"], 0)
    os.close(pidfd)
    if fd < 0:
        return f"pidfd_getfd: {os.strerror(ctypes.get_errno())}"
    driver, context = machine.driver, machine.driver.retain(machine.index)
    try:
        with driver.current(context):
            kind = api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
            handle = _ask(api, "cuMemImportFromShareableHandle", fd, kind)
            address = _mapped(api, handle, made["nbytes"], machine.index)
            content = np.zeros(made["nbytes"], dtype=np.uint8)
            driver.copy(content.ctypes.data, address, content.nbytes, 0)
            driver.synchronize_stream(0)
    except Failed as error:
        return str(error)
    finally:
        os.close(fd)
        driver.release(machine.index)
    return "the same bytes" if (content == made["value"]).all() else "other bytes"
