"""SGLang's own Llama."""

from __future__ import annotations

from sglang.srt.models.llama import LlamaForCausalLM

EntryClass = LlamaForCausalLM
