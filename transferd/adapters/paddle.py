"""Attached cache memory as Paddle tensors: zero-copy and with the true element types.

    planes = tensors(await client.attach(rank))              memory of the CPU place
    planes = adopted(await client.device_handle(rank), ops)  device memory, through FastDeploy's operators
    caches = flat(planes)                                    in the order of FastDeploy's forward pass
    await client.offer(rank, handle, caches=rows(planes))    memory that the engine created, checked first
    by_name = named(planes, rank, device)                    under the names that FastDeploy uses

`Client.attach` returns numpy arrays, which Paddle imports through DLPack. numpy has no bfloat16, so uint16 stands
for it. Paddle cannot compute with uint16, so the elements are passed as int16 and viewed as bfloat16 (checked
with paddle 3.3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from transferd.errors import ConfigError, TierError
from transferd.tiers.fastdeploy import segment_name
from transferd.tiers.owner import check_owner
from transferd.tiers.paddle import KIND, FastDeployOperators

_ORDER = ("key", "value", "key_scale", "value_scale", "indexer")


def tensors(caches: Mapping[str, Sequence[npt.NDArray[Any]]], *, float8: bool = False) -> dict[str, list[Any]]:
    """{plane: [one paddle.Tensor per layer]} over the memory of `caches`, as `Client.attach` returns it.

    uint16 becomes bfloat16; float16, float32 and uint8 stay as they are. With `float8` the uint8 key and value
    planes are viewed as float8_e4m3fn (block_wise_fp8). The tensors borrow the memory: keep `caches` for as long as
    you use them. Raises ConfigError if paddle is not installed.
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


def adopted(handle: Mapping[str, Any], operators: FastDeployOperators, *, float8: bool = False) -> dict[str, list[Any]]:
    """{plane: [one paddle.Tensor per layer]} over device memory that another process published.

    handle: {kind, data} as `Client.device_handle` returns it.
    operators: FastDeployOperators of this rank's place.
    The tensors have the true types, like those of `tensors`. Call `Client.detach` after dropping them and before the
    cache is cleared. Raises TierError for another kind of handle, EngineGone if its owner has exited.
    """
    import paddle

    data = handle["data"]
    if handle["kind"] != KIND:
        raise TierError(f"the handle is of kind {handle['kind']!r}; FastDeploy's operators publish {KIND!r}")
    check_owner(data.get("owner"))
    planes: dict[str, list[Any]] = {}
    for item in sorted(data["arrays"], key=lambda item: int(item["layer"])):
        plane, shape, dtype = item["plane"], [int(n) for n in item["shape"]], str(item["dtype"])
        width = {"uint8": 1, "uint16": 2, "float16": 2, "float32": 4}[dtype]
        tensor = operators.adopt(data["names"][item["region"]], [*shape[:-1], shape[-1] * width])
        true = {"uint16": paddle.bfloat16, "float16": paddle.float16, "float32": paddle.float32}.get(dtype)
        if true is None and float8 and plane in ("key", "value"):
            true = paddle.float8_e4m3fn
        planes.setdefault(plane, []).append(tensor if true is None else tensor.view(true))
    return planes


class PaddleRows:
    """Reads and writes one cache tensor block by block from the host. Borrows the tensor; synchronizes its place."""

    def __init__(self, tensor: Any) -> None:
        self.blocks = int(tensor.shape[0])
        self._bytes = tensor.view("uint8")
        if self._bytes.data_ptr() != tensor.data_ptr():
            raise TierError(f"cannot write tensors of {tensor.place} as bytes: their uint8 view is a copy")

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
    """{plane: [one PaddleRows per layer]}: pass it as `caches` to `Client.offer`, for tensors on any device."""
    return {plane: [PaddleRows(tensor) for tensor in layers] for plane, layers in planes.items()}


def flat(planes: Mapping[str, Sequence[Any]]) -> list[Any]:
    """The list for FastDeploy's forward pass: layer by layer, the planes in order.

    key, value, key, value, … for GQA; four per layer with scales; one per layer for MLA.
    """
    ordered = [planes[plane] for plane in _ORDER if plane in planes]
    return [tensor for layer in zip(*ordered, strict=True) for tensor in layer]


def named(planes: Mapping[str, Sequence[Any]], rank: int, device: int) -> dict[str, Any]:
    """{name in FastDeploy: tensor}, for example key_caches_0_rank0.device0."""
    return {
        segment_name(plane, layer, rank, device): tensor
        for plane, layers in planes.items()
        for layer, tensor in enumerate(layers)
    }
