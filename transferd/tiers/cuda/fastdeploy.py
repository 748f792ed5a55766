"""A FastDeploy engine's cache as a DeviceHandle: FastDeploy shares one allocation per tensor (tiers/fastdeploy.py)."""

from __future__ import annotations

from pathlib import Path

from transferd.blocks.layout.base import BlockLayout
from transferd.tiers.arrays import describe
from transferd.tiers.base import DeviceHandle
from transferd.tiers.cuda import ipc
from transferd.tiers.fastdeploy import read, segment_name
from transferd.tiers.offered import DIRECTORY
from transferd.tiers.owner import Owner, as_data


def handle_of(
    layout: BlockLayout, rank: int, device: int, uuid: str, owner: Owner, directory: Path = DIRECTORY
) -> DeviceHandle:
    """The handle of a rank's cache that a FastDeploy engine has published.

    rank: the rank within its tensor-parallel group. device: the engine's index of the GPU. uuid: the GPU's UUID. owner:
    the engine's process, which FastDeploy does not publish. Raises EngineGone that names the missing tensor.
    """
    regions: list[ipc.ExportedRegion] = []
    arrays = describe(layout)
    for number, (part, place) in enumerate(zip(layout.segments, arrays, strict=True)):
        name = segment_name(part.plane.name, part.layer, rank, device)
        nbytes = layout.device_blocks_of(part.layer) * part.nbytes
        regions.append(ipc.ExportedRegion(handle=read(name, directory).hex(), nbytes=nbytes))
        place |= {"offset": 0, "region": number}
    data = ipc.CudaHandle(device=uuid, owner=as_data(owner), regions=regions, arrays=arrays)
    return DeviceHandle(ipc.KIND, ipc.as_data(data))
