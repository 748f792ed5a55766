"""Attached cache memory as paddle tensors: the same bytes, in their true types, without a copy.

    planes = tensors(await client.attach(rank))              memory of the CPU place
    planes = adopted(await client.device_handle(rank), ops)  memory of a device, through FastDeploy's operators
    caches = flat(planes)                                    as FastDeploy's forward pass indexes it
    await client.offer(rank, handle, caches=rows(planes))    memory that the engine made, checked first
    by_name = named(planes, rank, device)                    under the names that FastDeploy exchanges

`Client.attach` returns numpy arrays, which Paddle takes over by DLPack. numpy has no bfloat16, so a uint16
array stands for it; Paddle would take it for its own uint16, which it cannot compute with, so the
elements travel as int16 and are viewed as bfloat16 on the other side (checked with paddle 3.3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from transferd.errors import ConfigError, TierError
from transferd.tiers.fastdeploy import segment_name
from transferd.tiers.owner import check_owner
from transferd.tiers.paddle_ops import KIND, Operators

_ORDER = ("key", "value", "key_scale", "value_scale", "indexer")


def tensors(caches: Mapping[str, Sequence[npt.NDArray[Any]]], *, float8: bool = False) -> dict[str, list[Any]]:
    """{plane: [one paddle.Tensor per layer]} over the memory of `caches`, as `Client.attach` returns it.

    uint16 arrives as bfloat16, float16 and float32 as themselves, uint8 as uint8; with `float8` the uint8
    key and value planes are viewed as float8_e4m3fn (block_wise_fp8). The tensors borrow the memory:
    keep `caches` for as long as they are used. Raises ConfigError without paddle.
    """
    try:
        import paddle
        from paddle.utils.dlpack import from_dlpack
    except ImportError as error:
        raise ConfigError("paddle", "is not installed: pip install 'transferd[paddle]'") from error

    def tensor(plane: str, array: npt.NDArray[Any]) -> Any:
        if array.dtype == "uint16":
            return from_dlpack(array.view("int16")).view(paddle.bfloat16)
        made = from_dlpack(array)
        if float8 and array.dtype == "uint8" and plane in ("key", "value"):
            return made.view(paddle.float8_e4m3fn)
        return made

    return {plane: [tensor(plane, array) for array in layers] for plane, layers in caches.items()}


def adopted(handle: Mapping[str, Any], operators: Operators, *, float8: bool = False) -> dict[str, list[Any]]:
    """{plane: [one paddle.Tensor per layer]} over a device's memory that another process published.

    handle: {kind, data} as `Client.device_handle` returns it. operators: FastDeployOperators of this rank's
    place. The tensors have the true types, as those of `tensors`; before the cache is cleared drop them, and
    `Client.detach`. Raises TierError for another kind of handle, EngineGone when its owner is no more.
    """
    import paddle

    data = handle["data"]
    if handle["kind"] != KIND:
        raise TierError(f"memory of kind {handle['kind']!r} is not published by FastDeploy's operators")
    check_owner(data.get("owner"))
    planes: dict[str, list[Any]] = {}
    for item in sorted(data["arrays"], key=lambda item: int(item["layer"])):
        plane, shape, dtype = item["plane"], [int(n) for n in item["shape"]], str(item["dtype"])
        width = {"uint8": 1, "uint16": 2, "float16": 2, "float32": 4}[dtype]
        tensor = operators.adopt(data["names"][item["region"]], [*shape[:-1], shape[-1] * width], "uint8")
        true = {"uint16": paddle.bfloat16, "float16": paddle.float16, "float32": paddle.float32}.get(dtype)
        if true is None and float8 and plane in ("key", "value"):
            true = paddle.float8_e4m3fn
        planes.setdefault(plane, []).append(tensor if true is None else tensor.view(true))
    return planes


class PaddleRows:
    """One tensor of a cache, read and written block by block from the host. Borrows it; ends all work on its place."""

    def __init__(self, tensor: Any) -> None:
        self.blocks = int(tensor.shape[0])
        self._bytes = tensor.view("uint8")
        if self._bytes.data_ptr() != tensor.data_ptr():
            raise TierError(f"tensors of {tensor.place} cannot be written as bytes: a view of them is a copy")

    def read_block(self, block: int) -> bytes:
        data: bytes = self._bytes[block].cpu().numpy().tobytes()
        return data

    def write_block(self, block: int, data: bytes) -> None:
        import paddle

        row = np.frombuffer(data, dtype=np.uint8).reshape(self._bytes.shape[1:])
        self._bytes[block] = paddle.to_tensor(row, place=self._bytes.place)
        if not self._bytes.place.is_cpu_place():
            paddle.device.synchronize()


def rows(planes: Mapping[str, Sequence[Any]]) -> dict[str, list[PaddleRows]]:
    """{plane: [one PaddleRows per layer]}: what `Client.offer` takes as `caches` for tensors of any device."""
    return {plane: [PaddleRows(tensor) for tensor in layers] for plane, layers in planes.items()}


def flat(planes: Mapping[str, Sequence[Any]]) -> list[Any]:
    """The list that FastDeploy's forward pass takes: layer by layer, its planes in order.

    key, value, key, value, … for GQA; four a layer with scales; one a layer for MLA.
    """
    ordered = [planes[plane] for plane in _ORDER if plane in planes]
    return [tensor for layer in zip(*ordered, strict=True) for tensor in layer]


def named(planes: Mapping[str, Sequence[Any]], rank: int, device: int) -> dict[str, Any]:
    """{FastDeploy's name: tensor}, such as key_caches_0_rank0.device0."""
    return {
        segment_name(plane, layer, rank, device): tensor
        for plane, layers in planes.items()
        for layer, tensor in enumerate(layers)
    }
