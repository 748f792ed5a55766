"""Shares Paddle tensors of any device between processes, with the operators that FastDeploy builds for it.

Paddle has no portable call for this: CUDA, XPU and others each have their own handles. FastDeploy builds one set of
operators per device, always under the same names, and an engine that runs on such a device has them installed:

    set_data_ipc(tensor, name)                              publish
    share_external_data(empty, name, shape[, use_ipc])      a tensor over published memory; XPU wants the flag
    unset_data_ipc(tensor, name, close_ipc, unlink_shm)     release; missing on XPU, where we only remove the name

(FastDeploy, custom_ops/{gpu,xpu}_ops and cache_manager/ops.py.) The objects they write (tiers/fastdeploy.py) contain
neither size nor offset, so our handle carries the shapes. Tested with a fake of these operators, not on a device.
"""

from __future__ import annotations

import contextlib
import importlib
from pathlib import Path
from typing import Any, Protocol

from transferd.blocks.layout.base import BlockLayout
from transferd.errors import EngineGone, RequestError, TierError
from transferd.tiers.arrays import Region, describe, locate
from transferd.tiers.base import DeviceHandle
from transferd.tiers.fastdeploy import segment_name
from transferd.tiers.offered import DIRECTORY, check_name
from transferd.tiers.owner import as_data, this_process

KIND = "fastdeploy_ops"
ERRORS = (RuntimeError, ValueError, OSError, MemoryError)  # the types that Paddle's own errors have


class Operators(Protocol):
    """Publishes and maps tensors. Paddle's own errors (ERRORS) pass through."""

    def publish(self, tensor: Any, name: str) -> None: ...
    def adopt(self, name: str, shape: list[int], dtype: str) -> Any: ...
    def withdraw(self, tensor: Any, name: str, *, adopted: bool) -> None:
        """Unmap an adopted tensor, or remove the name of a published one."""
        ...


class FastDeployOperators:
    """The operators of an installed FastDeploy. place: such as "xpu:0" or "gpu:1". Raises TierError without them."""

    def __init__(self, place: str, paddle: Any, *, module: Any = None, directory: Path = DIRECTORY) -> None:
        kind = place.partition(":")[0]
        try:
            self._module = module or importlib.import_module(f"fastdeploy.model_executor.ops.{kind}")
        except ImportError as error:
            what = f"memory of {place} is shared by FastDeploy's operators, which are not installed: {error}"
            raise TierError(what) from error
        self._paddle = paddle
        self._use_ipc = (True,) if kind == "xpu" else ()
        self._directory = directory

    def publish(self, tensor: Any, name: str) -> None:
        self._module.set_data_ipc(tensor, name)

    def adopt(self, name: str, shape: list[int], dtype: str) -> Any:
        if not (self._directory / name).exists():  # the operator would end the process
            raise EngineGone(f"{name} is not published")
        return self._module.share_external_data(self._paddle.empty([], dtype=dtype), name, shape, *self._use_ipc)

    def withdraw(self, tensor: Any, name: str, *, adopted: bool) -> None:
        unset = getattr(self._module, "unset_data_ipc", None)
        if unset is not None:
            unset(tensor, name, adopted, not adopted)
        elif not adopted:
            with contextlib.suppress(FileNotFoundError):
                (self._directory / name).unlink()


def handle_of(layout: BlockLayout, rank: int, device: int, place: str) -> DeviceHandle:
    """A handle of tensors that this process has published under FastDeploy's names, one for each array."""
    names = [segment_name(part.plane.name, part.layer, rank, device) for part in layout.segments]
    arrays = [place_of | {"offset": 0, "region": i} for i, place_of in enumerate(describe(layout))]
    data = {"place": place, "names": names, "arrays": arrays, "owner": as_data(this_process())}
    return DeviceHandle(KIND, data)


def names_of(layout: BlockLayout, handle: DeviceHandle) -> list[str]:
    """The names of a handle's arrays, in the layout's order, after a check of the arrays against the layout.

    Raises RequestError (`layout_mismatch`, `bad_value`).
    """
    names, arrays = handle.data.get("names"), handle.data.get("arrays")
    if not isinstance(names, list):
        raise RequestError("the handle has no list of names", code="bad_value")
    for name in names:
        check_name(name)
    if not isinstance(arrays, list) or len(names) != len(arrays):
        raise RequestError("the handle does not have one name for each array", code="bad_value")
    # Each array fills its region: we know no size but the one that follows from its shape.
    longest = max(layout.device_blocks_of(part.layer) * part.nbytes for part in layout.segments) * 2
    locate(layout, arrays, [Region(i * longest, longest) for i in range(len(arrays))])
    found = {(item["plane"], item["layer"]): names[item.get("region", 0)] for item in arrays}
    return [found[part.plane.name, part.layer] for part in layout.segments]
