"""Blocks go through every tier under the real PrefixCacheManager, and every byte is right."""

from __future__ import annotations

from pathlib import Path

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
