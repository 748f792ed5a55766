"""What two SGLang servers must have in common: each fact changes when what it names changes, and not otherwise."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support import fake_sglang as sglang
from transferd.adapters.sglang import arguments, identity, pools
from transferd.adapters.sglang.settings import settings
from transferd.blocks.fingerprint import refusal

EXTRA = {"interface_v1": 1, "allocator": "shm"}


def facts(said: dict[str, Any] | None, life: str = "life", **extra: Any) -> dict[str, Any]:
    pool = sglang.HostPool()
    pages = pools.pages_of("kv", pool)
    config = sglang.HiCacheStorageConfig()
    found = identity.facts(config, "kv", pool, pages, settings(EXTRA | extra), said, life)
    assert not refusal(found)
    return found


def directory(place: Path, name: str, numbers: bytes = b"one") -> Path:
    """A model or an adapter whose files are as old as can be, so that they were read after their last change."""
    where = place / name
    where.mkdir(exist_ok=True)
    (where / "model.safetensors").write_bytes(numbers * 5000)
    (where / "config.json").write_text(json.dumps({"hidden_size": 8}), encoding="ascii")
    for file in where.iterdir():
        os.utime(file, (1, 1))
    return where


@pytest.fixture
def said(tmp_path: Path) -> dict[str, Any]:
    """What SGLang has resolved."""
    adapter = {"lora_id": "0", "lora_name": "mine", "lora_path": str(directory(tmp_path, "adapter")), "pinned": False}
    return {
        "model_path": str(directory(tmp_path, "model")),
        "attention_backend": "fa3",
        "dtype": "auto",
        "lora_paths": [adapter],
        "port": 1,
        "weight_cache_mode": "off",
        "_explicitly_set": True,
    }


def test_no_argument_is_in_two_lists() -> None:
    lists = (arguments.COUNT, arguments.APART, arguments.NO_MATTER)
    assert sum(map(len, lists)) == len(frozenset.union(*lists))


@pytest.mark.parametrize("name", ["attention_backend", "kv_cache_dtype", "of_a_newer_version", "ep_size"])
def test_an_argument_that_counts_or_that_nobody_knows_makes_another_identity(said: dict[str, Any], name: str) -> None:
    assert facts(said | {name: "another"}) != facts(said)
    assert facts(said | {name: False}) != facts(said | {name: None}), "off is not unset"


@pytest.mark.parametrize("name", ["port", "max_running_requests", "served_model_name", "_explicitly_set"])
def test_an_argument_that_does_not_matter_makes_no_other_identity(said: dict[str, Any], name: str) -> None:
    assert facts(said | {name: "another"}) == facts(said)


def test_a_retrained_adapter_makes_another_identity(said: dict[str, Any], tmp_path: Path) -> None:
    before = facts(said)
    assert before["LoRA adapters"].endswith(f"mine={tmp_path / 'adapter'}")
    directory(tmp_path, "adapter", b"two")
    assert facts(said) != before
    assert facts(said | {"lora_paths": None}) != facts(said)
    assert facts(said, loras="mine-7", weights="w") == facts(said, loras="mine-7", weights="w")
    assert facts(said, loras="mine-7") != facts(said, loras="mine-8")


def test_adapters_without_files_serve_one_start(said: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    unseen = said | {"lora_paths": [{"lora_name": "mine", "lora_path": "nobody/mine"}]}
    with caplog.at_level(logging.WARNING, "sglang.transferd"):
        one, other = (facts(unseen, life, weights="w")["LoRA adapters"] for life in ("one", "two"))
    assert one != other
    assert "nobody/mine has no files to be seen" in caplog.text


@pytest.mark.parametrize("name", ["quantization_param_path", "uno_lora_path", "speculative_token_map"])
def test_an_argument_that_names_a_file_counts_by_its_contents(said: dict[str, Any], tmp_path: Path, name: str) -> None:
    file = tmp_path / "file.json"
    file.write_text("1", encoding="ascii")
    before = facts(said | {name: str(file)})
    assert facts(said | {name: str(file)}) == before
    file.write_text("2", encoding="ascii")
    assert facts(said | {name: str(file)}) != before


@pytest.mark.parametrize(
    "elsewhere",
    [
        {"load_format": "remote_instance"},
        {"weight_cache_mode": "client"},
        {"checkpoint_engine_wait_weights_before_ready": True},
    ],
    ids=lambda one: next(iter(one)),
)
def test_weights_from_another_process_serve_one_start_unless_they_are_named(
    said: dict[str, Any], caplog: pytest.LogCaptureFixture, elsewhere: dict[str, Any]
) -> None:
    said |= elsewhere
    with caplog.at_level(logging.WARNING, "sglang.transferd"):
        assert facts(said, "one") != facts(said, "two")
    assert 'do not come from its files, so no other start gets these pages: set "weights"' in caplog.text
    assert facts(said, "one", weights="w", loras="l") == facts(said, "two", weights="w", loras="l")
