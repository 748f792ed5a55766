"""Offers the daemon device memory that a worker or the cache messager created, under FastDeploy's names.

FastDeploy's processes publish each tensor by `set_data_ipc` as key_caches_{layer}_rank{rank}.device{device} and the
like (tiers/fastdeploy.py); its transfer processes mapped them by name. The engine's process does not hold the
memory; it only gives the daemon the names, so workers need no code of ours.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from transferd.blocks.layout import build_layout
from transferd.blocks.layout.base import BlockLayout
from transferd.client.sync_client import SyncClient
from transferd.config import Config
from transferd.tiers.arrays import describe
from transferd.tiers.base import DeviceHandle
from transferd.tiers.fastdeploy import read, segment_name
from transferd.tiers.offered import DIRECTORY
from transferd.tiers.owner import Owner, as_data, this_process


def offer_published(client: SyncClient, config: Config, devices: Mapping[int, int]) -> None:
    """Offer these ranks' published caches to the daemon; return once all are mapped.

    devices: of each rank, its device index in FastDeploy's numbering. If memory has no such names (shm), this offers
    nothing: its creator offers it. Raises EngineGone naming a tensor that is not published, RequestError, TierError.
    """
    if config.geometry.device not in ("cuda", "paddle"):
        return
    for rank, device in devices.items():
        client.offer(rank, _published(config, rank, device))


def _published(config: Config, rank: int, device: int) -> DeviceHandle:
    layout = build_layout(config.geometry)
    if config.geometry.device == "paddle":
        from transferd.tiers.paddle import handle_of as by_operators

        return by_operators(layout, rank, device, f"gpu:{device}")
    from transferd.tiers.cuda.bindings import open_driver

    return handle_of(layout, rank, device, open_driver().describe(_seen_as(device)).uuid, this_process())


def handle_of(
    layout: BlockLayout, rank: int, device: int, uuid: str, owner: Owner, directory: Path = DIRECTORY
) -> DeviceHandle:
    """The handle of a rank's cache that FastDeploy's processes have published, one allocation per tensor.

    rank: the rank within its tensor-parallel group.
    device: the engine's index of the GPU.
    uuid: the GPU's UUID.
    owner: the engine's process, which FastDeploy does not publish.
    Raises EngineGone that names the missing tensor.
    """
    from transferd.tiers.cuda import ipc

    regions: list[ipc.ExportedRegion] = []
    arrays = describe(layout)
    for number, (part, place) in enumerate(zip(layout.segments, arrays, strict=True)):
        name = segment_name(part.plane.name, part.layer, rank, device)
        nbytes = layout.device_blocks_of(part.layer) * part.nbytes
        regions.append(ipc.ExportedRegion(handle=read(name, directory).hex(), nbytes=nbytes))
        place |= {"offset": 0, "region": number}
    data = ipc.CudaHandle(device=uuid, owner=as_data(owner), regions=regions, arrays=arrays)
    return DeviceHandle(ipc.KIND, ipc.as_data(data))


def published_by_whom(config: Config, devices: Mapping[int, int], directory: Path = DIRECTORY) -> tuple[bytes, ...]:
    """What is published now as each rank's first tensor: another process's memory has another handle.

    Empty for memory without such names (shm). Raises EngineGone naming a tensor that is not published.
    """
    if config.geometry.device not in ("cuda", "paddle"):
        return ()
    first = build_layout(config.geometry).segments[0]
    names = (segment_name(first.plane.name, first.layer, rank, device) for rank, device in devices.items())
    return tuple(read(name, directory) for name in names)


def _seen_as(device: int) -> int:
    """This process's index of a GPU that FastDeploy names by its index on the machine."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return visible.index(str(device)) if str(device) in visible else device
