"""FastDeploy's exchange of cache memory: a CUDA IPC handle for each tensor, in POSIX shared memory.

Its set_data_ipc writes a segment per tensor (8 bytes of its own, then the 64 of the handle) named

    {plane name}_{layer}_rank{local rank}.device{device}

and its share_external_data opens it. A handle names a whole allocation and the exchange says nothing of
an offset, so a tensor has to be the beginning of its allocation, as FastDeploy's caches are.
(FastDeploy: cache_transfer_manager.py; the custom operators set_data_ipc and share_external_data.)
"""

from __future__ import annotations

from pathlib import Path

from transferd.errors import EngineGone
from transferd.layout.base import BlockLayout
from transferd.tiers.arrays import describe
from transferd.tiers.base import DeviceHandle
from transferd.tiers.cuda import ipc
from transferd.tiers.owner import Owner, as_data
from transferd.tiers.segment import DIRECTORY

NAMES = {
    "key": "key_caches",
    "value": "value_caches",
    "key_scale": "key_cache_scales",
    "value_scale": "value_cache_scales",
    "indexer": "indexer_caches",
}
_OWN_BYTES = 8


def segment_name(plane: str, layer: int, rank: int, device: int) -> str:
    """What FastDeploy calls the segment of one tensor."""
    return f"{NAMES[plane]}_{layer}_rank{rank}.device{device}"


def handle_of(
    layout: BlockLayout, rank: int, device: int, uuid: str, owner: Owner, directory: Path = DIRECTORY
) -> DeviceHandle:
    """The handle of a rank's cache that a FastDeploy engine has published.

    rank: within its tensor-parallel group. device: as the engine names it. uuid: of that GPU. owner: the
    engine's process, which the exchange does not name. Raises EngineGone naming the tensor that is missing.
    """
    regions: list[ipc.ExportedRegion] = []
    arrays = describe(layout)
    for number, (part, place) in enumerate(zip(layout.segments, arrays, strict=True)):
        name = segment_name(part.plane.name, part.layer, rank, device)
        nbytes = layout.device_blocks_of(part.layer) * part.nbytes
        regions.append(ipc.ExportedRegion(handle=_read(directory / name).hex(), nbytes=nbytes))
        place |= {"offset": 0, "region": number}
    data = ipc.CudaHandle(device=uuid, owner=as_data(owner), regions=regions, arrays=arrays)
    return DeviceHandle(ipc.KIND, ipc.as_data(data))


def _read(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise EngineGone(f"the engine has not published {path.name}: {error.strerror}") from error
    handle = content[_OWN_BYTES : _OWN_BYTES + ipc.HANDLE_BYTES]
    if len(handle) != ipc.HANDLE_BYTES:
        raise EngineGone(f"{path.name} has {len(content)} bytes: no IPC handle is in it")
    return handle
