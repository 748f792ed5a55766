"""transferd's store that notes the sha256 of every object that an engine puts and gets, from the engine's memory."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from transferd.adapters import mooncake_store
from transferd.adapters.mooncake_store import MooncakeHostMemAllocator, ReplicateConfig

__all__ = ["MooncakeDistributedStore", "MooncakeHostMemAllocator", "ReplicateConfig"]


class _Event:
    """On a CPU a step is over when it was submitted; vLLM's connector waits for CUDA."""

    def record(self, *_: object) -> None:
        """Nothing runs on."""

    synchronize = record


if not torch.cuda.is_available():
    torch.cuda.Event = _Event


class MooncakeDistributedStore(mooncake_store.MooncakeDistributedStore):
    def batch_put_from_multi_buffers(
        self, keys: Sequence[str], pointers: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]], config: Any = None
    ) -> list[int]:
        there = self.batch_is_exist(keys)
        codes = super().batch_put_from_multi_buffers(keys, pointers, sizes, config)
        _note("stored", keys, pointers, sizes, [code == 0 and not one for code, one in zip(codes, there, strict=True)])
        return codes

    def batch_get_into_multi_buffers(
        self,
        keys: Sequence[str],
        pointers: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        prefer_alloc_in_same_node: bool = False,
    ) -> list[int]:
        codes = super().batch_get_into_multi_buffers(keys, pointers, sizes, prefer_alloc_in_same_node)
        _note("loaded", keys, pointers, sizes, [code > 0 for code in codes])
        return codes


def _note(what: str, keys: Sequence[str], pointers: Sequence[Any], sizes: Sequence[Any], moved: Sequence[bool]) -> None:
    if not (place := os.environ.get("TRANSFERD_WITNESS")):
        return
    with (Path(place) / f"{os.getpid()}.jsonl").open("a", encoding="ascii") as file:
        for key, some, lengths, one in zip(keys, pointers, sizes, moved, strict=True):
            if one:
                content = b"".join(ctypes.string_at(at, size) for at, size in zip(some, lengths, strict=True))
                file.write(json.dumps([what, key, hashlib.sha256(content).hexdigest()]) + "\n")
