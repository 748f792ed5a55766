"""A small model of each family under vLLM's real engine: its blocks are loaded to the byte, or the start is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.machine.with_vllm import models
from tests.machine.with_vllm.engine import Engine, witnessed
from tests.machine.with_vllm.test_engine import prompts, tokens

pytestmark = pytest.mark.timeout(1200)

# No answer of 8 tokens fills a block of 16 or 32: computed in other pieces, its last bits may differ.
LENGTHS = (418, 290, 162)
ROOMY = {"num_gpu_blocks_override": 400, "max_num_seqs": 4}
WITHOUT_GROUPS = {"disable_hybrid_kv_cache_manager": True}
RIGHT = [("sliding", {}), ("hybrid", {}), ("hybrid", WITHOUT_GROUPS), ("mla", {}), ("shared", {})]
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("mamba", {}, "--enable-prefix-caching --mamba-cache-mode align"),
    ("full", {"pipeline_parallel_size": 2}, "pipeline_parallel_size: must be 1"),
]
ERROR = "transferd.errors.ConfigError: "


@pytest.mark.parametrize("kind", ["connector", "tier"])
@pytest.mark.parametrize(("family", "options"), RIGHT, ids=[name + " without groups" * bool(o) for name, o in RIGHT])
def test_each_way_loads_what_it_stored(place: Path, kind: str, family: str, options: dict[str, Any]) -> None:
    asked = prompts(1, *LENGTHS)
    more = {"model": models.made(place, family), "llm": ROOMY | options}
    cold, warm = Engine(place, kind, [asked, asked], **more).result()
    assert tokens(cold) == tokens(warm)
    assert [answer["cached"] for answer in cold] == [0, 0, 0]
    assert [answer["cached"] for answer in warm] == [416, 288, 160]
    _, loaded = witnessed(place)
    assert loaded


@pytest.mark.parametrize(("family", "options", "named"), REFUSED, ids=["states", "pipeline"])
def test_the_connector_refuses_what_it_cannot_serve_in_one_line(
    place: Path, family: str, options: dict[str, Any], named: str
) -> None:
    engine = Engine(place, "connector", [prompts(1, 100)], model=models.made(place, family), llm=options)
    with pytest.raises(AssertionError):
        engine.result()
    # torch may put the rank in front of the line, and each rank says it.
    (line,) = {line.partition(ERROR)[2] for line in engine.log.splitlines() if ERROR in line}
    assert named in line
    assert "use TransferdTier" in line
