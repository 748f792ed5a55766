"""Device memory across processes: what a handle of kind "cuda_ipc" holds, and how it is opened.

The process that allocated with cudaMalloc exports, the other one maps; both see the same bytes. Either
side may be the engine:

* `create`: `CudaDeviceTier.handle()` exports, the engine calls `attach(data)` and gets arrays;
* `attach`: the engine calls `export(arrays)` and hands the data over, the daemon calls
  `CudaDeviceTier.adopt(data)` before `open()`, which maps them instead of allocating. FastDeploy's
  exchange through named shared memory arrives as the same data (`fastdeploy.handle_of`).

The data of a handle (`CudaHandle`), plain types only:

    device   UUID of the GPU, 32 hex digits: indices differ between processes, the UUID does not
    owner    who allocated, as owner.as_data() says it (boot id, pid and its start); checked when opened
    regions  [{handle, offset, nbytes}]: the 64 bytes of a CUDA IPC handle in hex, which names a whole
             allocation; where in it the region starts; how long the region is
    arrays   [{plane, layer, offset, shape, dtype, region}], as for every kind: offset from the region's start
    event    the 64 bytes of a CUDA IPC event handle in hex, or "". Work that was recorded into it is
             waited for before device blocks are read or written

A handle may be opened once per process: CUDA maps an allocation once, and a second opening of the same
one here shares the mapping of the first (`Mapping.close` is counted).
"""

from __future__ import annotations

from typing import Any

import msgspec

KIND = "cuda_ipc"
HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE


class ExportedRegion(msgspec.Struct, frozen=True, kw_only=True):
    """A range of one allocation. handle: hex of the allocation's IPC handle. offset: of the range in it."""

    handle: str
    nbytes: int
    offset: int = 0


class CudaHandle(msgspec.Struct, frozen=True, kw_only=True):
    """The data of a DeviceHandle of this kind; see the module."""

    device: str
    owner: dict[str, Any]
    regions: list[ExportedRegion]
    arrays: list[dict[str, Any]]
    event: str = ""
