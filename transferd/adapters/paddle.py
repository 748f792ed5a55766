"""Attached cache memory as paddle tensors: the same bytes, in their true types, without a copy.

`Client.attach` returns numpy arrays, which Paddle takes over by DLPack. numpy has no bfloat16, so a uint16
array stands for it; Paddle would take it for its own uint16, which it cannot compute with, so the
elements travel as int16 and are viewed as bfloat16 on the other side (checked with paddle 3.3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt

from transferd.errors import ConfigError


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
