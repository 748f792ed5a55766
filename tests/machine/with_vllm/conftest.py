"""Tests that need vLLM: `make vllm-check` sets up an environment that has it. Elsewhere none is collected."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import with_engine

MISSING = importlib.util.find_spec("vllm") is None

if MISSING:
    collect_ignore_glob = ["test_*.py"]
else:
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of vLLM and torch themselves
        importlib.import_module("vllm.v1.kv_offload.tiering.spec")
        # vLLM looks at a model's class in a process that imports everything again, half a minute of a core
        registry = importlib.import_module("vllm.model_executor.models.registry")
        registry._run_in_subprocess = lambda look: look()  # type: ignore[attr-defined]
    gc.freeze()


def pytest_report_header() -> str | None:
    return with_engine.header("vllm", MISSING)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    with_engine.mark(items, "vllm")


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with with_engine.short_place("vllm", monkeypatch) as directory:
        yield directory
