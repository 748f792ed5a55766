"""Model directories and LoRA adapters, as trainers write them: safetensors files beside a config.json."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import numpy as np

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_theta": 10000.0, "num_hidden_layers": 2}
NUMBERS = 4096  # of each tensor


def model(directory: Path, seed: int, *, files: int = 2, config: dict[str, object] | None = None) -> Path:
    """Write a model in place, or write it anew: the same names, sizes and headers for every seed."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG if config is None else config), encoding="ascii")
    for number in range(files):
        name = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        safetensors(directory / name, [f"layer.{number}.weight"], seed * files + number)
    return directory


def adapter(directory: Path, seed: int) -> Path:
    """Write a LoRA adapter."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text('{"r": 8, "peft_type": "LORA"}', encoding="ascii")
    return safetensors(directory / "adapter_model.safetensors", ["lora_A", "lora_B"], seed).parent


def safetensors(file: Path, tensors: list[str], seed: int) -> Path:
    """A file of float32 tensors with numbers drawn from the seed."""
    nbytes = NUMBERS * 4
    header = {
        name: {"dtype": "F32", "shape": [NUMBERS], "data_offsets": [i * nbytes, (i + 1) * nbytes]}
        for i, name in enumerate(tensors)
    }
    text = json.dumps(header).encode()
    data = np.random.default_rng(seed).standard_normal(NUMBERS * len(tensors), dtype=np.float32).tobytes()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return file


def cached(hub: Path, repository: str, commit: str, seed: int) -> Path:
    """A snapshot in Hugging Face's cache, made as its library makes one: blobs first, then links to them."""
    top = hub / f"models--{repository.replace('/', '--')}"
    made = model(top / "made", seed)
    snapshot = top / "snapshots" / commit
    for directory in (top / "blobs", top / "refs", snapshot):
        directory.mkdir(parents=True, exist_ok=True)
    for file in sorted(made.iterdir()):
        blob = top / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
        file.unlink() if blob.exists() else file.rename(blob)
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    made.rmdir()
    (top / "refs" / "main").write_text(commit, encoding="ascii")
    return snapshot
