"""Real conversations under vLLM's engine, with a GPU cache that holds few of them: blocks come and go all the time.

The trace is not part of the repository: it is looked for beside it, or where TRANSFERD_TEST_TRACE says; else the small
one in examples/ is played. TRANSFERD_TEST_REQUESTS says how many of its requests.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

from tests.machine.with_vllm.engine import Engine, witnessed

ROOT = Path(__file__).parents[3]
BESIDE = ROOT.parent / "shared" / "traces" / "conversation_trace.jsonl"
TRACE = Path(os.environ.get("TRANSFERD_TEST_TRACE", BESIDE if BESIDE.exists() else ROOT / "examples" / "trace.jsonl"))
REQUESTS = int(os.environ.get("TRANSFERD_TEST_REQUESTS", "500"))
TOKENS = 32  # for each hash id of the trace, which stands for 512
MOST_IDS = 30  # of a request, that it fits the model
TOGETHER = 50  # requests of a round


def conversations() -> list[list[int]]:
    """Prompts that share prefixes as the trace's requests do."""
    prompts = []
    for line in TRACE.read_text(encoding="ascii").splitlines()[:REQUESTS]:
        prompt: list[int] = []
        for number in json.loads(line)["hash_ids"][:MOST_IDS]:
            draw = random.Random(number)
            prompt += [draw.randrange(3, 500) for _ in range(TOKENS)]
        prompts.append([*prompt, 7])
    return prompts


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["tier", "connector"])
def test_conversations_are_right_to_the_byte(place: Path, kind: str) -> None:
    prompts = conversations()
    rounds = [prompts[start : start + TOGETHER] for start in range(0, len(prompts), TOGETHER)]
    options = {"max_tokens": 2, "llm": {"num_gpu_blocks_override": 110, "max_num_seqs": 3}, "forget": []}
    if kind == "tier":
        options["extra"] = {"cpu_bytes_to_use": 100 * 2 * 16384}  # a host pool of about a hundred blocks, too
    answered = Engine(place, kind, rounds, **options).result()
    assert [len(answers) for answers in answered] == [len(asked) for asked in rounds]
    stored, loaded = witnessed(place)
    shared = sum(answer["cached"] for answers in answered for answer in answers)
    assert stored
    assert loaded
    figures = f"{stored} blocks stored, {loaded} loaded, {shared} tokens not computed"
    print(f"{kind}: {len(prompts)} requests, {figures}")
