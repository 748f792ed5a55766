"""Each family of models under vLLM's real engine, one engine a family: answers that depend on every loaded block.

A first turn is computed and stored. A second one finds all in vLLM's own cache, a third one loads it: their answers
must be the same. In a fourth one the loaded blocks are zeroed: if the answers were the same then, the others would show
nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.machine.with_vllm import images, models
from tests.machine.with_vllm.engine import Engine, layers_witnessed, witnessed
from tests.machine.with_vllm.test_engine import prompts, tokens

pytestmark = pytest.mark.timeout(1200)

LENGTHS, STATES_LENGTHS = (418, 290, 162), (1200, 700, 1700)
CACHED = {"enable_prefix_caching": True, "num_gpu_blocks_override": 400}
STATES = {"dtype": "bfloat16", "max_model_len": 2048, "mamba_cache_mode": "align"}
# vLLM 0.32's kernel for Mamba 2 on CPUs exports no state from the middle of a chunk.
CHUNKS = {
    "mamba 2": {"block_size": 64, "long_prefill_token_threshold": 64},
    "granite 4": {"long_prefill_token_threshold": 64},
}
SAME, OTHER = 1e-5, 0.05  # differences of log probabilities: from the same blocks, and from other ones


def differences(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> list[float]:
    """For each prompt, the largest difference of the log probabilities as far as the tokens agree."""
    found = []
    for a, b in zip(one, other, strict=True):
        same = next((i for i, (x, y) in enumerate(zip(a["tokens"], b["tokens"], strict=True)) if x != y), None)
        pairs = zip(a["logprobs"][:same], b["logprobs"][:same], strict=True)
        found.append(max((abs(x - y) for x, y in pairs), default=float("inf")))
    return found


def played(place: Path, kind: str, family: str) -> list[list[dict[str, Any]]]:
    """What the second, third and fourth turn answered."""
    states = family in models.STATES
    asked = prompts(1, *(STATES_LENGTHS if states else LENGTHS))
    options = STATES | CHUNKS.get(family, {}) if states else {}
    more = {"model": models.made(place, family), "llm": CACHED | options}
    _, *rest = Engine(place, kind, [asked] * 4, real=True, forget=[1, 2], zeroed=[3], **more).result()
    return rest


@pytest.mark.parametrize("kind", ["connector", "tier"])
@pytest.mark.parametrize("family", [*models.ATTENTION, *models.STATES])
def test_answers_come_from_what_was_loaded(place: Path, family: str, kind: str) -> None:
    local, loaded, zeroed = played(place, kind, family)
    assert all(answer["cached"] for answer in local)
    assert [answer["cached"] for answer in loaded] == [answer["cached"] for answer in local]
    assert tokens(loaded) == tokens(local)
    assert max(differences(local, loaded)) < SAME
    assert min(differences(local, zeroed)) > OTHER, "the answers do not depend on what was loaded"
    assert witnessed(place)[1]
    if kind == "tier":
        return
    made = models.FAMILIES[family]
    assert len(layers_witnessed(place)) == made.get("num_hidden_layers", 2) - made.get("num_kv_shared_layers", 0)


@pytest.mark.skipif(images.missing(), reason="no torchvision")
@pytest.mark.parametrize("kind", ["connector", "tier"])
def test_the_same_text_with_other_images_is_another_prompt(place: Path, kind: str) -> None:
    one, other = ["describe the picture " * 4, 1, " and more" * 12], ["describe the picture " * 4, 2, " and more" * 12]
    more = {"model": models.made(place, "qwen2 vl"), "images": True}
    options = {"limit_mm_per_prompt": {"image": 1, "video": 0}, "mm_processor_cache_gb": 0}
    rounds = [[one], [one], [one], [other], [one]]
    cold, local, loaded, others, zeroed = Engine(
        place, kind, rounds, real=True, forget=[1, 2, 3], zeroed=[4], llm=options, **more
    ).result()
    assert cold[0]["cached"] == 0
    assert loaded[0]["cached"] == local[0]["cached"] > others[0]["cached"] > 0, "the text before the image"
    assert tokens(loaded) == tokens(local)
    assert max(differences(local, loaded)) < SAME
    assert min(differences(local, others)) > 0.001, "the image counts"
    assert min(differences(local, zeroed)) > OTHER
    assert witnessed(place)[1]


def test_with_a_draft_model_a_key_determines_its_bytes(place: Path) -> None:
    """A draft's KV of a block's last token depends on the next one, which vLLM's hash of the block does not cover."""
    shared, one, other = prompts(3, 128, 60, 60)
    drafts = {"method": "eagle", "model": models.made(place, "eagle"), "num_speculative_tokens": 2}
    for number, tail in enumerate((one, other)):
        more = {"llm": {"speculative_config": drafts}, "extra": {"generation": f"{number}"}}  # each stores all blocks
        Engine(place, "connector", [[shared + tail]] * 2, real=True, **more).result()
    stored, loaded = witnessed(place)
    assert loaded
    assert stored == 3 + 2 * 3, "three blocks in common, whose next tokens are, too"
