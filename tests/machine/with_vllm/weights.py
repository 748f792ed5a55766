"""Random weights of the size of trained ones, so that answers depend on the whole context.

vLLM makes up weights of ±0.001: with them a model answers the same whatever is in its KV cache. They are put in before
vLLM packs them, because a change of a parameter has no effect after that.
"""

from __future__ import annotations

from typing import Any

import torch


def use() -> None:
    """Have `load_format="dummy"` make up such weights."""
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    loads = DummyModelLoader.load_weights

    def load_weights(self: Any, model: Any, model_config: Any) -> None:
        loads(self, model, model_config)
        draw = torch.Generator().manual_seed(7)
        for name, weight in model.named_parameters():
            if weight.is_floating_point():
                with torch.no_grad():
                    weight.copy_(made(name, weight.shape, draw))

    DummyModelLoader.load_weights = load_weights


def made(name: str, shape: Any, draw: torch.Generator) -> torch.Tensor:
    """A weight, whose name says what it is for."""
    noise = torch.randn(shape, generator=draw)
    last = name.rpartition(".")[2]
    if last in ("A", "A_log", "dt_bias"):  # linear attention forgets slowly
        return {"A": -0.05, "A_log": -3.0, "dt_bias": -2.0}[last] + 0.01 * noise
    if noise.ndim < 2:
        return (1.0 if "norm" in name else 0.0) + 0.1 * noise
    return noise * (0.5 if "embed" in name else 1.5 / noise.shape[-1] ** 0.5)
