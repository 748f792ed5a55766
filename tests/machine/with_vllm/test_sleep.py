"""vLLM's sleep, levels 1 and 2, and new weights after it: no block of the old weights is served.

vLLM for CPUs frees nothing when it sleeps. What counts here is what it calls on the way: it pauses, empties its caches
and resets its connector, as on a GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.machine.with_vllm.engine import Engine, witnessed
from tests.machine.with_vllm.test_engine import prompts

pytestmark = pytest.mark.timeout(900)

LENGTHS = (200, 300)
ALL, NONE = [192, 288], [0, 0]
RESETS: dict[str, Any] = {"extra": {"keep_blocks_on_reset": False}}


def cached(answers: list[dict[str, Any]]) -> list[int]:
    return [answer["cached"] for answer in answers]


def test_after_a_sleep_engines_of_one_weight_version_share_and_older_blocks_are_not_found(place: Path) -> None:
    asked, others = prompts(1, *LENGTHS), prompts(2, *LENGTHS)
    sleeps = {"0": [1, None], "1": [2, "step 1"], "2": [2, "step 2"]}  # after which round, how deep, what weights then
    rounds = Engine(place, "connector", [asked] * 4, sleeps=sleeps, forget=[3], **RESETS).result()
    assert [cached(answers) for answers in rounds] == [NONE] * 4
    sleeps = {"0": [2, "step 2"]}
    rounds = Engine(place, "connector", [others, asked], sleeps=sleeps, forget=[], **RESETS).result()
    assert [cached(answers) for answers in rounds] == [NONE, ALL], "the other engine has stored them at step 2"
    assert witnessed(place)[1] == sum(ALL) // 32


def test_a_tier_finds_nothing_of_the_weights_before_a_sleep(place: Path) -> None:
    asked = prompts(1, *LENGTHS)
    rounds = Engine(place, "tier", [asked, asked], sleeps={"0": [1, None]}, forget=[], **RESETS).result()
    assert [cached(answers) for answers in rounds] == [NONE] * 2
