"""Blocks go through every tier under the real PrefixCacheManager, and every byte is right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.machine.with_fastdeploy.engine import engine


def prompts(count: int, length: int = 40) -> list[list[int]]:
    return [[1000 * number + i for i in range(length)] for number in range(count)]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_blocks_come_back_from_the_host(place: Path, tp: int) -> None:
    with engine(tp=tp, gpu_blocks=24, cpu_blocks=48) as made:
        asked = prompts(4)
        for tokens in asked:
            assert made.run(tokens)["gpu_match_token_num"] == 0
        made.settle()
        hit = sum(made.run(tokens)["cpu_match_token_num"] for tokens in asked)
        assert hit > 0
        made.settle()


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_blocks_come_back_from_storage(place: Path, tp: int) -> None:
    with engine(tp=tp, gpu_blocks=16, cpu_blocks=0, backend="file") as made:
        asked = prompts(3)
        for tokens in asked:
            made.run(tokens)
        for tokens in asked[:2]:
            assert made.run(tokens)["storage_match_token_num"] == 40
        made.settle()


SCALES = {"block_wise_fp8": {"key_scale", "value_scale"}}
MTP = '{"method": "mtp", "num_extra_cache_layer": 1, "num_gpu_block_expand_ratio": 1.5}'


@pytest.mark.parametrize(
    ("tp", "shape"),
    [
        (1, {"dtype": "uint8"}),
        (2, {"dtype": "block_wise_fp8", "speculative": MTP}),
        (2, {"latent": 576}),
        (1, {"latent": 576, "speculative": MTP}),
    ],
    ids=["int8", "fp8 with MTP", "MLA", "MLA with MTP"],
)
def test_every_shape_of_a_cache_goes_through_both_tiers(place: Path, tp: int, shape: dict[str, Any]) -> None:
    """Keys, values and scales, or latents alone, and the layers of a draft model, which have more blocks."""
    with engine(tp=tp, gpu_blocks=24, cpu_blocks=24, backend="file", **shape) as made:
        planes = set(made.workers[0].caches)
        assert planes == ({"key"} if "latent" in shape else {"key", "value"}) | SCALES.get(made.shape.dtype, set())
        found = {"cpu_match_token_num": 0, "storage_match_token_num": 0}
        for tokens in prompts(8) + prompts(8)[::-1]:  # the last ones are in the host pool, the first ones only stored
            metrics = made.run(tokens)
            found = {name: count + metrics[name] for name, count in found.items()}
        assert min(found.values()) > 0, found
        made.settle()
