"""Small models of each family, whose weights vLLM makes up: how their KV lies in blocks is what matters here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.machine.with_vllm import play

WINDOW = 100  # tokens: a few blocks, and no multiple of one
GEMMA = {
    "num_hidden_layers": 4, "sliding_window": WINDOW, "query_pre_attn_scalar": 32, "rms_norm_eps": 1e-6,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "rope_local_base_freq": 10000.0,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "full": {},
    "sliding": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": WINDOW},
    "hybrid": {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", **GEMMA},
    "mla": {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "num_key_value_heads": 4,
        "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32,
        "first_k_dense_replace": 2, "moe_intermediate_size": 64, "n_routed_experts": 2, "n_shared_experts": 1,
    },
    "mamba": {
        "architectures": ["MambaForCausalLM"], "model_type": "mamba", "state_size": 16, "conv_kernel": 4,
        "time_step_rank": 8, "expand": 2, "use_bias": False, "use_conv_bias": True,
    },
    "shared": {
        "architectures": ["Gemma3nForCausalLM"], "model_type": "gemma3n_text", **GEMMA, "num_kv_shared_layers": 2,
        "intermediate_size": [256] * 4, "activation_sparsity_pattern": [0.0] * 4, "laurel_rank": 16,
        "altup_num_inputs": 2, "altup_active_idx": 0, "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": 512,
    },
}  # fmt: skip


def made(place: Path, family: str) -> str:
    """The directory of a model of this family."""
    return str(play.tiny_model(place / family, **FAMILIES[family]))
