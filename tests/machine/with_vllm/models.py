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


YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, "rope_theta": 10000.0,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
HALF = ["sliding_attention", "full_attention"] * 2
LINEAR = {  # heads as small as vLLM's kernels for CPUs allow
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
FAMILIES |= {
    "gemma 4": {
        "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "num_hidden_layers": 4,
        "layer_types": HALF, "sliding_window": WINDOW, "global_head_dim": 64, "rms_norm_eps": 1e-6,
        "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 512, "num_kv_shared_layers": 0,
        "tie_word_embeddings": True, "num_global_key_value_heads": 2, "rope_theta": None,
    },
    "gpt-oss": {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_hidden_layers": 4, "layer_types": HALF,
        "sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": True,
        "rope_parameters": YARN, "rope_theta": None,
    },
    "llama 4": {
        "architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text", "num_hidden_layers": 4,
        "attention_chunk_size": 128, "no_rope_layers": [1, 0, 1, 0], "num_local_experts": 2, "num_experts_per_tok": 1,
        "intermediate_size_mlp": 256, "interleave_moe_layer_step": 2, "use_qk_norm": True,
        "layer_types": ["chunked_attention", "full_attention"] * 2,
    },
    "qwen3 next": {
        "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_hidden_layers": 4, "head_dim": 64,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"], "num_experts": 4, "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 64, "mlp_only_layers": [], "torch_dtype": "bfloat16", **EXPERTS, **LINEAR,
    },
    "mamba 2": {
        "architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "num_heads": 4, "head_dim": 64,
        "state_size": 64, "n_groups": 1, "expand": 2, "conv_kernel": 4, "chunk_size": 64, "use_bias": False,
        "use_conv_bias": True, "layer_norm_epsilon": 1e-5, "torch_dtype": "bfloat16",
    },
    "granite 4": {
        "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "num_hidden_layers": 3,
        "layer_types": ["mamba", "attention", "mamba"], "mamba_n_heads": 4, "mamba_n_groups": 1, "mamba_d_state": 64,
        "mamba_d_head": 64, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 64, "num_local_experts": 0,
        "shared_intermediate_size": 128, "num_experts_per_tok": 0, "position_embedding_type": "nope",
        "torch_dtype": "bfloat16",
    },
}  # fmt: skip

FAMILIES["qwen2 vl"] = {
    "architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl", "image_token_id": 262,
    "video_token_id": 263, "vision_start_token_id": 259, "vision_end_token_id": 260, "vision_token_id": 261,
    "eos_token_id": 258, "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
    "vision_config": {
        "depth": 2, "embed_dim": 64, "hidden_size": 128, "num_heads": 2, "mlp_ratio": 2, "patch_size": 14,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3, "in_chans": 3,
    },
}  # fmt: skip
FAMILIES["eagle"] = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}  # a draft model for "full"


def made(place: Path, family: str) -> str:
    """The directory of a model of this family."""
    return str(play.tiny_model(place / family, **FAMILIES[family]))


# Those that test_families.py runs, and what docs/vllm.md calls them.
ATTENTION = {
    "full": "Llama", "sliding": "Mistral", "hybrid": "Gemma 3", "gemma 4": "Gemma 4", "gpt-oss": "gpt-oss",
    "llama 4": "Llama 4",
}  # fmt: skip
STATES = {"qwen3 next": "Qwen3-Next", "mamba 2": "Mamba 2", "granite 4": "Granite 4"}
IMAGES = {"qwen2 vl": "Qwen2-VL"}
BYTES = {"mla": "DeepSeek V2", "shared": "Gemma 3n"}  # test_models.py does, and compares only bytes and tokens
