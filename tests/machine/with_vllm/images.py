"""Prompts with images, for a small Qwen2-VL with the real processors of its family.

They need torchvision, and PyPI has it for CUDA only. Its Python works without its compiled parts, once the names of
their operators are there; no processor calls one. check.py puts it where only this module finds it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

PLACE = Path(__file__).resolve().parents[3] / "build" / "vllm" / "images"
SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
TEXT = "<|im_start|>{}<|vision_start|><|image_pad|><|vision_end|>{}"
SIDE = 112  # pixels: 16 tokens
OPERATORS = torch.library.Library("torchvision", "FRAGMENT")  # they are gone with this object


def use() -> None:
    """Make torchvision importable, if it is there. Call it before transformers looks for it."""
    if missing():
        return
    sys.path.append(str(PLACE))
    for name in ("nms", "qnms"):
        OPERATORS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision  # type: ignore[import-not-found] # noqa: F401


def write_processors(model: str) -> None:
    """Write a tokenizer of one token a byte, and an image processor, into a model's directory."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    added = {"special": True, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    files: dict[str, Any] = {
        "vocab.json": {letters[byte]: i for i, byte in enumerate([*printable, *others])},
        "tokenizer_config.json": {
            "tokenizer_class": "Qwen2Tokenizer",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "added_tokens_decoder": {str(256 + i): {"content": name} | added for i, name in enumerate(SPECIAL)},
        },
        "preprocessor_config.json": {
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "Qwen2VLProcessor",
            "size": {"shortest_edge": 56 * 56, "longest_edge": SIDE * SIDE},
        },
    }
    for name, content in files.items():
        (Path(model) / name).write_text(json.dumps(content), encoding="ascii")
    (Path(model) / "merges.txt").write_text("#version: 0.2\n", encoding="ascii")


def prompt(before: str, seed: int, after: str) -> dict[str, Any]:
    """A prompt for vLLM with the image of this seed."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    return {"prompt": TEXT.format(before, after), "multi_modal_data": {"image": Image.fromarray(pixels)}}


def missing() -> bool:
    return not os.path.isdir(PLACE / "torchvision")
