"""The facts of a vLLM engine, from configurations as vLLM 0.32 has them. tests/machine/with_vllm has its objects."""

from __future__ import annotations

import sys
import time
import types
from pathlib import Path
from types import SimpleNamespace as Section
from typing import Any

import pytest

from tests.support import weights
from transferd.adapters.common import fingerprint
from transferd.adapters.vllm import identity
from transferd.adapters.vllm.settings import settings
from transferd.blocks.fingerprint import differences, refusal

CHOSEN = settings("s", {})
HF: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "sliding_window": None,
}
HF |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "transformers_version": "5.19.0"}
MODEL = {"dtype": "torch.float16", "quantization": None, "max_model_len": 2048, "revision": None, "seed": 0}
MODEL |= {"disable_sliding_window": False, "model_impl": "auto"}
CACHE = {"cache_dtype": "auto", "block_size": 32, "sliding_window": None, "calculate_kv_scales": False}
PARALLEL = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1, "rank": 0}
PARALLEL |= {"enable_expert_parallel": False, "data_parallel_rank": 0}


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    package, platforms = types.ModuleType("vllm"), types.ModuleType("vllm.platforms")
    package.__version__ = "0.32.0"  # type: ignore[attr-defined]
    capability = lambda: "9.0"  # noqa: E731
    platforms.current_platform = Section(device_type="cuda", get_device_capability=capability)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", package)
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    monkeypatch.setattr(fingerprint, "process_started", lambda: time.time() + 3600)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return weights.model(tmp_path / "model", 1)


def config(at: Path, *, draft: Any = None, lora: Any = None, **other: dict[str, Any]) -> Any:
    hf = Section(to_dict=lambda: HF | other.get("hf", {}), _commit_hash=None)
    return Section(
        model_config=Section(model=str(at), hf_config=hf, hf_text_config=hf, **(MODEL | other.get("model", {}))),
        cache_config=Section(**(CACHE | other.get("cache", {}))),
        parallel_config=Section(**(PARALLEL | other.get("parallel", {}))),
        attention_config=Section(**({"backend": None, "flash_attn_version": None} | other.get("attention", {}))),
        load_config=Section(load_format="auto", download_dir=None),
        speculative_config=draft,
        lora_config=lora,
        kv_transfer_config=Section(engine_id="e"),
    )


def facts(made: Any, chosen: Any = CHOSEN, life: str = "life") -> dict[str, Any]:
    groups = [Section(kv_cache_spec=None)]
    found = identity.of_connector(made, {"layer": (2, 32, 64)}, {"layer": (0, 1, 2)}, 4096, groups, chosen, life)
    assert not refusal(found)
    return found


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "theta": (
        {"hf": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}},
        "rope theta 10000.0 / 1000000.0",
    ),
    "scaling": ({"hf": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}}, "rope scaling"),
    "window": ({"hf": {"sliding_window": 4096}}, "sliding window (none) / 4096"),
    "window turned off": ({"model": {"disable_sliding_window": True}}, "model disable sliding window"),
    "any other key": ({"hf": {"rms_norm_eps": 1e-6}}, "model configuration"),
    "quantization": ({"model": {"quantization": "fp8"}}, "model quantization"),
    "dtype": ({"model": {"dtype": "torch.bfloat16"}}, "dtype"),
    "KV dtype": ({"cache": {"cache_dtype": "fp8"}}, "cache cache dtype"),
    "KV scales": ({"cache": {"calculate_kv_scales": True}}, "KV scales"),
    "tokens a block": ({"cache": {"block_size": 64}}, "tokens a block 32 / 64"),
    "tensor parallel": ({"parallel": {"tensor_parallel_size": 2}}, "parallel shape"),
    "pipeline parallel": ({"parallel": {"pipeline_parallel_size": 2}}, "parallel shape"),
    "expert parallel": ({"parallel": {"enable_expert_parallel": True}}, "parallel shape"),
    "backend": ({"attention": {"backend": "FLASHINFER"}}, "attention"),
    "another setting of attention": ({"attention": {"flash_attn_version": 2}}, "attention"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_setting_that_changes_a_block_is_a_named_difference(model: Path, name: str) -> None:
    change, told = CHANGES[name]
    found = differences(facts(config(model)), facts(config(model, **change)))
    assert any(line.startswith(told) for line in found), found


@pytest.mark.parametrize(
    "change",
    [
        {"parallel": {"data_parallel_size": 4, "data_parallel_rank": 3}},
        {"model": {"max_model_len": 4096}},
        {"hf": {"transformers_version": "6.0", "_name_or_path": "/elsewhere"}},
    ],
)
def test_settings_that_change_no_block_are_no_difference(model: Path, change: dict[str, Any]) -> None:
    assert facts(config(model)) == facts(config(model, **change), life="another start")


def test_of_weights_that_are_not_seen_the_revision_counts() -> None:
    """A hub that is not Hugging Face's keeps its files elsewhere."""
    name = Path("organization/of-another-hub")
    one, other = (facts(config(name, model={"revision": revision})) for revision in ("v1", "v2"))
    assert list(differences(one, other)) == ["weights not seen, revision v1 / not seen, revision v2"]
    assert facts(config(name))["weights"] == "not seen"


def test_scales_that_a_start_computes_are_shared_with_no_other_start(model: Path) -> None:
    made = config(model, cache={"calculate_kv_scales": True})
    assert facts(made, life="1") != facts(made, life="2")


def test_longrope_depends_on_the_longest_sequence(model: Path) -> None:
    rope = {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}
    ours, theirs = (facts(config(model, hf=rope, model={"max_model_len": most})) for most in (4096, 8192))
    assert "longest sequence 4096 / 8192" in differences(ours, theirs)


def test_a_draft_model_counts_with_its_weights(tmp_path: Path, model: Path) -> None:
    drafted = weights.model(tmp_path / "draft", 5)

    def made() -> dict[str, Any]:
        hf = Section(to_dict=lambda: HF)
        draft = Section(method="eagle", model=str(drafted), revision=None, draft_model_config=Section(hf_config=hf))
        return facts(config(model, draft=draft))

    before = made()
    assert before == made() != facts(config(model))
    weights.model(drafted, 6)
    assert [line.partition("/")[0][:13] for line in differences(before, made())] == ["draft weights"]


def test_a_tier_finds_the_configuration_in_the_calls_that_create_it(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    offloading = Section(
        engine_id="e",
        parallel=Section(tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, is_parallelism_agnostic=True),
        model=Section(name=str(model), dtype="float16"),
        cache=Section(tokens_per_hash=32, blocks_per_chunk=1),
        groups=[Section(tokens_per_block=32, layer_names=("a",))],
        kv_cache_layout="LBHNC", canonical_layout=False, replicated_layout=False,
    )  # fmt: skip

    def connector(vllm_config: Any, engine_id: str = "e", chosen: Any = CHOSEN) -> dict[str, Any]:
        assert vllm_config is not None
        offloading.engine_id = engine_id
        return identity.of_tier(offloading, 4096, chosen, str(time.monotonic_ns()))

    one = connector(config(model))
    assert one == connector(config(model))
    assert "rope theta 10000.0 / 1000000.0" in differences(one, connector(config(model, **CHANGES["theta"][0])))
    assert not caplog.messages
    tuned = config(model, lora=Section())
    assert connector(tuned) != connector(tuned)
    named = settings("s", {"loras": "7"})
    assert connector(tuned, chosen=named) == connector(tuned, chosen=named)
    assert all('"loras"' in message for message in caplog.messages)
    caplog.clear()
    assert connector(config(model), "another engine") != connector(config(model), "another engine")
    assert all('"weights"' in message for message in caplog.messages)
    offloading.parallel.tp_size = 2
    assert "parallel [1, 1, 1, 1] / [2, 1, 1, 1]" in differences(one, connector(config(model)))
