"""Routing replay with CPU cache and storage: the rows that FastDeploy's engine reads are those of its own tokens."""

from __future__ import annotations

import importlib.util
import json
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.machine.with_fastdeploy.engine import BLOCK_SIZE, Engine, Shape
from tests.machine.with_fastdeploy.test_tiers import prompts

MANAGER = "fastdeploy.cache_manager.routing_cache_manager"
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec(MANAGER) is None, reason="this FastDeploy moves no routing with blocks"
)
REPLAY = {"enable_routing_replay": True, "num_moe_layers": 3, "moe_top_k": 2, "routing_dtype": "uint16"}


class Rows:
    """What a worker writes for each token of a block, and what the engine finds there: as a Worker of engine.py."""

    rank = 0

    def __init__(self, buffer: npt.NDArray[Any]) -> None:
        self._blocks = buffer.reshape(-1, BLOCK_SIZE, *buffer.shape[1:])

    def fill(self, block: int, content: str) -> None:
        self._blocks[block] = self._rows(content)

    def check(self, block: int, content: str) -> None:
        assert np.array_equal(self._blocks[block], self._rows(content)), f"routing of block {block}"

    def _rows(self, content: str) -> npt.NDArray[Any]:
        random = np.random.default_rng(zlib.crc32(content.encode()))
        return random.integers(0, 60000, self._blocks.shape[1:], dtype=np.uint16)


@pytest.mark.parametrize(("backend", "cpu_blocks"), [(None, 48), ("file", 0), ("file", 24)])
@pytest.mark.parametrize("tp", [1, 2])
def test_the_routing_of_every_block_that_is_found_is_its_own(
    place: Path, tp: int, backend: str | None, cpu_blocks: int
) -> None:
    from fastdeploy.cache_manager.routing_cache_manager import RoutingHostBuffer

    replay = SimpleNamespace(to_json_string=lambda: json.dumps(REPLAY), **REPLAY)
    made = Engine(Shape(tp=tp, gpu_blocks=24, cpu_blocks=cpu_blocks, backend=backend, routing=replay))
    # numpy 2 takes no -1 for an unsigned type, with which FastDeploy fills it: the same bytes, as a signed one
    rows = RoutingHostBuffer(24, BLOCK_SIZE, 3, 2, "int16", dp_suffix=str(made.port))
    try:
        made.start()
        workers: list[Any] = made.workers
        workers.append(Rows(rows.buffer.view("uint16")))
        found = {"cpu_match_token_num": 0, "storage_match_token_num": 0}
        for tokens in prompts(5) + prompts(5):
            metrics = made.run(tokens)
            found = {name: count + metrics[name] for name, count in found.items()}
        assert found["cpu_match_token_num" if backend is None else "storage_match_token_num"] > 0
        made.settle()
    finally:
        made.close()
        rows.close()
